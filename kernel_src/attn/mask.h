// Which scores exist: a row sees a key when no mask forbids it. Masks also know their extent, so that products over
// tiles that nobody sees are skipped and tiles that everybody sees are not tested.
#pragma once
#include "base/math.h"
#include "qualifiers.h"

namespace attn {

// Key n is visible to query row m when n <= m + diagonal (causal), and always otherwise.
// `Int` is what an architecture counts rows and keys with.
template <class C, class P, class Int = i64>
struct Mask {
  Int seq_kv, diagonal;
  METHOD explicit Mask(P const& p) : seq_kv((Int)p.seq_kv), diagonal((Int)p.diagonal) {}

  // Keys below this exist for some row of [first, first + rows).
  METHOD Int keys_end(Int first, Int rows) const {
    if constexpr (!C::causal) return seq_kv;
    return base::most<Int>(0, base::least(seq_kv, first + rows + diagonal));
  }
  // The first row that sees the key.
  METHOD Int rows_begin(Int key) const {
    if constexpr (!C::causal) return 0;
    return base::most<Int>(0, key - diagonal);
  }
  // Whether every row from `row` on sees every key below `keys_end`.
  METHOD bool whole(Int row, Int keys_end) const { return !C::causal || keys_end <= row + diagonal + 1; }

  // In coordinates of a panel and a tile: visible when column - row <= limit.
  METHOD i32 limit(Int first_row, Int first_key) const {
    return C::causal ? (i32)base::least<Int>(first_row + diagonal - first_key, 1 << 30) : 1 << 30;
  }
};

}  // namespace attn
