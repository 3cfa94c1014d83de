// Partial sums of dQ in float32, [rows][ld], one for each query head and split of the keys.
#pragma once
#include "attn/layout.h"
#include "qualifiers.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct PartialGradQuery {
  static constexpr i64 ld = arch::Sums<C::panel, C::head_dim>::ld;

  // Products take rows in pairs, and whole cache lines keep what follows aligned.
  static METHOD i64 floats(P const& p) { return (p.seq_q + 2 + 15) / 16 * 16 * ld; }

  // In the workspace, where other blocks' splits of the head can be added to it.
  static METHOD float* shared(P const& p, i64 split, i64 batch, i64 head) {
    return p.workspace + ((split * p.batch + batch) * p.heads_q + head) * floats(p);
  }
  static METHOD i64 shared_bytes(P const& p) {
    return p.splits == 1 ? 0 : p.splits * p.batch * p.heads_q * floats(p) * (i64)sizeof(float);
  }

  // dQ = scale times the sum.
  static METHOD void store(const float* sum, i64 batch, i64 head, i64 first, i64 rows, P const& p) {
    const auto to = rows_view(p.grad_q, batch, p.grad_q_batch, head, p.grad_q_head, first, p.grad_q_row, 1);
    arch::store_rows<C::head_dim>(to, sum + first * ld, ld, rows, p.scale);
  }
};

}  // namespace attn
