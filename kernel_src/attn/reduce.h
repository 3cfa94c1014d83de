// dQ = scale times the sum of its partial sums, in the order of the splits.
#pragma once
#include "attn/layout.h"
#include "attn/schedule.h"
#include "attn/workspace.h"

namespace attn {

// Query rows first .. first + rows - 1 of one head.
template <class C, class P>
FN void reduce_grad_query(i64 batch, i64 head, i64 first, i64 rows, P const& p) {
  const i64 ld = Workspace<C, P>::ld;
  float* sum = Workspace<C, P>(p, 0, batch, head).grad_q + first * ld;
  for (i64 split = 1; split < p.splits; ++split)
    arch::add(sum, Workspace<C, P>(p, split, batch, head).grad_q + first * ld, rows * ld);
  const auto to = rows_view(p.grad_q, batch, p.grad_q_batch, head, p.grad_q_head, first, p.grad_q_row, 1);
  arch::store_rows<C::head_dim>(to, sum, ld, rows, p.scale);
}

template <class C, class P>
struct ReduceGradQuery {
  struct Memory {};

  static METHOD void run(i64 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p);
    reduce_grad_query<C>(b.batch, b.head, b.first, b.rows, p);
  }
};

}  // namespace attn
