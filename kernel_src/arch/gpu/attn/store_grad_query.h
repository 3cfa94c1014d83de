// dQ = scale times its sums.
#pragma once
#include "accumulate.h"
#include "attn/layout.h"
#include "attn/workspace.h"

namespace attn {

template <class C, class P>
struct StoreGradQuery {
  using E = typename C::Element;
  using Row = RowData<C, P>;
  struct Memory {};

  static METHOD void run(i32 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p, 1);
    const auto to = rows_view(p.grad_q, b.batch, p.grad_q_batch, b.head, p.grad_q_head, b.first, p.grad_q_row, 1);
    const float* sums = Row::grad_query(Row::row((i64)b.batch * p.heads_q + b.head, b.first, p), p);
    for (i32 i = (i32)ptx::thread_index(); i < b.rows * pieces; i += 32 * C::warps) {
      const i32 row = i / pieces, first = i % pieces * elements;
      float x[8];
      if constexpr (elements == 8) {
        arch::load_accumulated(x, sums, row, first, Row::ld);
      } else {
#pragma unroll
        for (i32 e = 0; e < elements; ++e) x[e] = sums[arch::accumulated_at(row, first + e, Row::ld)];
      }
#pragma unroll
      for (i32 e = 0; e < elements; ++e) x[e] *= p.scale;
      E* at = to.row(row) + first;
      if constexpr (elements == 1)
        *at = arch::narrow(E{}, x[0]);
      else
        ptx::store_global<elements * sizeof(E)>(at, arch::pack_elements<E, elements>(x));
    }
  }

 private:
  // As many at a time as divide a row, up to 16 bytes.
  static constexpr i32 elements = base::least(C::head_dim & -C::head_dim, (i32)(arch::chunk_bytes / sizeof(E)));
  static constexpr i32 pieces = C::head_dim / elements;
};

}  // namespace attn
