// What kernels of one pass leave for the next in the workspace behind the magnitudes: float32, laid out here and
// sized by jitattn/plan.py.
#pragma once
#include "attn/magnitude.h"
#include "attn/schedule.h"
#include "base/math.h"
#include "tile.h"

namespace attn {

// Where the keys of a forward pass are split: of each split the output and the natural-log LSE.
// out [splits][batch * heads_q][seq_q][ld], lse [splits][batch * heads_q][seq_q].
template <class C, class P>
struct PartialOut {
  static constexpr i32 ld = base::round_up(C::head_dim_v, 32);

  static METHOD i64 rows(P const& p) { return (i64)p.batch * p.heads_q * p.seq_q; }
  static METHOD i64 row(QueryBlock const& b, P const& p) {
    return ((i64)b.batch * p.heads_q + b.head) * p.seq_q + b.first;
  }
  static METHOD float* out(i32 split, i64 row, P const& p) { return begin(p) + (split * rows(p) + row) * ld; }
  static METHOD float* lse(i32 split, i64 row, P const& p) {
    return begin(p) + p.splits * rows(p) * ld + split * rows(p) + row;
  }

 private:
  static METHOD float* begin(P const& p) { return p.workspace + Magnitudes<C, P, false>::floats(p); }
};

// What the backward pass keeps for each query row, rows being padded so that no tile ends beyond them:
// lse [batch * heads_q][rows] in base 2, delta likewise, then sums of dQ [batch * heads_q][rows][ld] and, where sums
// are added in order, numbers that tell whose turn it is [batch * heads_q][rows].
template <class C, class P>
struct RowData {
  static constexpr i32 ld = base::round_up(C::head_dim, 64);  // no kernel pads more

  static METHOD i64 rows(P const& p) { return base::ceil_div(p.seq_q, (i64)128) * 128; }
  static METHOD i64 all_rows(P const& p) { return (i64)p.batch * p.heads_q * rows(p); }
  static METHOD i64 row(i64 head, i64 first, P const& p) { return head * rows(p) + first; }

  static METHOD float* lse(i64 row, P const& p) { return begin(p) + row; }
  static METHOD float* delta(i64 row, P const& p) { return begin(p) + all_rows(p) + row; }
  static METHOD float* grad_query(i64 row, P const& p) { return begin(p) + 2 * all_rows(p) + row * ld; }
  static METHOD u32* turn(i64 row, P const& p) { return reinterpret_cast<u32*>(grad_query(all_rows(p), p)) + row; }

 private:
  static METHOD float* begin(P const& p) { return p.workspace + Magnitudes<C, P, true>::floats(p); }
};

}  // namespace attn
