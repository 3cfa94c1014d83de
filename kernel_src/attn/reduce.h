// dQ = scale times the sum of its partial sums, in the order of the splits.
#pragma once
#include "attn/layout.h"
#include "attn/schedule.h"
#include "attn/workspace.h"

namespace attn {

template <class C, class P>
struct ReduceGradQuery {
  struct Memory {};

  static METHOD void run(i64 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p);
    const i64 ld = Workspace<C, P>::ld;
    float* sum = Workspace<C, P>(p, 0, b.batch, b.head).grad_q + b.first * ld;
    for (i64 split = 1; split < p.splits; ++split)
      arch::add(sum, Workspace<C, P>(p, split, b.batch, b.head).grad_q + b.first * ld, b.rows * ld);
    const auto to = rows_view(p.grad_q, b.batch, p.grad_q_batch, b.head, p.grad_q_head, b.first, p.grad_q_row, 1);
    arch::store_rows<C::head_dim>(to, sum, ld, b.rows, p.scale);
  }
};

}  // namespace attn
