// Which scores exist: a row sees a key when no mask forbids it. Masks also know their extent, so that products over
// tiles that nobody sees are skipped and tiles that everybody sees are not tested.
#pragma once
#include "base/math.h"
#include "qualifiers.h"

namespace attn {

// Key n is visible to query row m when n <= m + diagonal (causal), and always otherwise.
template <class C, class P>
struct Mask {
  i64 seq_kv, diagonal;
  METHOD explicit Mask(P const& p) : seq_kv(p.seq_kv), diagonal(p.diagonal) {}

  // Keys below this exist for some row of [first, first + rows).
  METHOD i64 keys_end(i64 first, i64 rows) const {
    if constexpr (!C::causal) return seq_kv;
    return base::most<i64>(0, base::least(seq_kv, first + rows + diagonal));
  }
  // The first row that sees the key.
  METHOD i64 rows_begin(i64 key) const {
    if constexpr (!C::causal) return 0;
    return base::most<i64>(0, key - diagonal);
  }
  // Whether every row from `row` on sees every key below `keys_end`.
  METHOD bool whole(i64 row, i64 keys_end) const { return !C::causal || keys_end <= row + diagonal + 1; }

  // In coordinates of a panel and a tile: visible when column - row <= limit.
  METHOD i32 limit(i64 first_row, i64 first_key) const {
    return C::causal ? (i32)base::least<i64>(first_row + diagonal - first_key, 1 << 30) : 1 << 30;
  }
};

}  // namespace attn
