// The backward pass's scratch in global memory, float32: for each split of the keys and each query head a partial dQ
// and two numbers a row. The host side of the sizes is plan.py.
#pragma once
#include "qualifiers.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Workspace {
  static constexpr i32 ld = arch::Sums<C::panel, C::head_dim>::ld;
  float* grad_q;  // [rows][ld]
  float* lse;     // [rows], in base 2; +inf for rows that saw nothing, whose probabilities then vanish
  float* delta;   // [rows], sum(dO * O) - dLSE

  METHOD Workspace(P const& p, i64 split, i64 batch, i64 head) {
    const i64 rows = p.workspace_rows;
    grad_q = p.workspace + ((split * p.batch + batch) * p.heads_q + head) * rows * (ld + 2);
    lse = grad_q + rows * ld;
    delta = lse + rows;
  }
};

}  // namespace attn
