// What the backward pass needs of each query row: its LSE in base 2 and delta = sum(dO * O) - dLSE. The sums of dQ that
// other blocks will add to, and whose turn it is, are cleared on the way.
#pragma once
#include "attn/layout.h"
#include "attn/workspace.h"

namespace attn {

template <class C, class P>
struct Delta {
  using E = typename C::Element;
  using Row = RowData<C, P>;
  struct Memory {};

  // `lanes` lanes share a row.
  static METHOD void run(i32 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p, 1);
    const i64 head = (i64)b.batch * p.heads_q + b.head;
    const auto out = rows_view(p.out, b.batch, p.out_batch, b.head, p.out_head, b.first, p.out_row, 1);
    const auto grad_out = rows_view(p.grad_out, b.batch, p.grad_out_batch, b.head, p.grad_out_head, b.first,
                                    p.grad_out_row, p.grad_out_dim);
    const i32 part = arch::lane() % lanes;
    constexpr i32 rows_apart = 32 * C::warps / lanes;
    // Several rows at a time, so that enough is on its way.
    for (i32 first = (i32)ptx::thread_index() / lanes; first < C::block_m; first += rows_apart * at_once) {
      float delta[at_once], lse[at_once];
#pragma unroll
      for (i32 i = 0; i < at_once; ++i) {
        const i32 row = base::least(first + i * rows_apart, b.rows - 1);
        delta[i] = row_product(out.row(row), grad_out.row(row), grad_out.step, part);
        lse[i] = p.lse[head * p.seq_q + b.first + row];
      }
#pragma unroll
      for (i32 i = 0; i < at_once; ++i) {
#pragma unroll
        for (i32 mask = 1; mask < lanes; mask *= 2) delta[i] += ptx::shuffle_xor(delta[i], mask);
        const i32 row = first + i * rows_apart;
        if (row < C::block_m) store(row, part, delta[i], lse[i], head, b, p);
      }
    }
  }

 private:
  // Rows are read `bytes` at a time.
  static constexpr i32 bytes = base::most(C::vector, (i32)sizeof(E)), elements = bytes / (i32)sizeof(E);
  static constexpr i32 pieces = base::ceil_div(C::head_dim_v, elements);
  static constexpr i32 lanes = pieces > 16 ? 32 : pieces > 8 ? 16 : pieces > 4 ? 8 : 4;
  static constexpr i32 at_once = pieces <= lanes ? 4 : 1;  // rows of a lane; of wide ones a row is enough

  static METHOD void store(i32 i, i32 part, float delta, float lse, i64 head, QueryBlock const& b, P const& p) {
    const i64 row = Row::row(head, b.first + i, p);
    if (b.first + i >= Row::rows(p)) return;
    if (part == 0) {
      if (i >= b.rows)
        delta = 0.0f, lse = -base::infinity;
      else if (p.grad_lse)
        delta -= p.grad_lse[head * p.seq_q + b.first + i];
      // Rows that saw nothing, and rows beyond the last, have an LSE of -inf: with +inf their probabilities vanish.
      *Row::lse(row, p) = lse == -base::infinity ? base::infinity : lse * base::log2_e;
      *Row::delta(row, p) = delta;
      if constexpr (C::ordered) *Row::turn(row, p) = 0;
    }
    if constexpr (C::clear) {
      float* sums = Row::grad_query(row, p);
      for (i32 d = 4 * part; d < Row::ld; d += 4 * lanes) ptx::store_global<16>(sums + d, Words4{});
    }
  }

  static METHOD float row_product(const E* a, const E* b, i64 b_step, i32 part) {
    float sum = 0.0f;
#pragma unroll
    for (i32 piece = 0; piece < pieces; piece += lanes) {
      const i32 first = (piece + part) * elements;
      if (first + elements <= C::head_dim_v) {
        const Words4 x = ptx::load_global<bytes>(a + first), y = ptx::load_global<bytes>(b + first * b_step);
#pragma unroll
        for (i32 i = 0; i < elements; ++i) sum += arch::element<E>(x, i) * arch::element<E>(y, i);
      } else {
        for (i32 i = first; i < C::head_dim_v; ++i) sum += arch::widen(a[i]) * arch::widen(b[i * b_step]);
      }
    }
    return sum;
  }
};

}  // namespace attn
