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
    // Two rows at a time, which lie together: the upper eight of 16 with the lower eight.
    const i32 pairs = base::ceil_div(b.rows, 16) * 8;
    for (i32 i = (i32)ptx::thread_index(); i < pairs * pieces; i += 32 * C::warps) {
      const i32 pair = i / pieces, row = pair / 8 * 16 + pair % 8, first = i % pieces * elements;
      float x[2][8];
      if constexpr (elements == 8) {
        arch::load_accumulated(x, sums, row, first, Row::ld);
      } else {
#pragma unroll
        for (i32 e = 0; e < 2 * elements; ++e)
          x[e / elements][e % elements] =
              sums[arch::accumulated_at(row + e / elements * 8, first + e % elements, Row::ld)];
      }
#pragma unroll
      for (i32 half = 0; half < 2; ++half)
        if (row + half * 8 < b.rows) store(to.row(row + half * 8) + first, x[half], p.scale);
    }
  }

 private:
  // As many at a time as divide a row, up to 16 bytes.
  static constexpr i32 elements = base::least(C::head_dim & -C::head_dim, (i32)(arch::chunk_bytes / sizeof(E)));
  static constexpr i32 pieces = C::head_dim / elements;

  static METHOD void store(E* to, float (&x)[8], float scale) {
#pragma unroll
    for (i32 e = 0; e < elements; ++e) x[e] *= scale;
    if constexpr (elements == 1)
      *to = arch::narrow(E{}, x[0]);
    else
      ptx::store_global<elements * sizeof(E)>(to, arch::pack_elements<E, elements>(x));
  }
};

}  // namespace attn
