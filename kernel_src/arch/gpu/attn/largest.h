// Finds what attn/magnitude.h tells: a warp reads one part of one head of one tensor.
#pragma once
#include "attn/layout.h"
#include "attn/magnitude.h"

namespace attn {

template <class C, class P, bool backward>
struct LargestOf {
  using E = typename C::Element;
  using Heads = Magnitudes<C, P, backward>;
  struct Memory {};

  static METHOD void run(i32 block, Memory&, P const& p) {
    const i64 slot = (i64)block * C::warps + arch::warp(), head = slot / Heads::parts;
    const i32 part = (i32)(slot % Heads::parts);
    float x = 0.0f;
    if (head < Heads::k(p))
      x = of_rows<C::head_dim>(p.q, head, p.heads_q, p.q_batch, p.q_head, p.q_row, p.q_dim, p.seq_q, part);
    else if (head < Heads::v(p))
      x = of_rows<C::head_dim>(p.k, head - Heads::k(p), p.heads_kv, p.k_batch, p.k_head, p.k_row, p.k_dim, p.seq_kv,
                               part);
    else if (head < Heads::grad_out(p))
      x = of_rows<C::head_dim_v>(p.v, head - Heads::v(p), p.heads_kv, p.v_batch, p.v_head, p.v_row, p.v_dim, p.seq_kv,
                                 part);
    else if (head < Heads::end(p))
      x = of_gradients(head, part, p);
    else
      return;
#pragma unroll
    for (i32 mask = 1; mask < 32; mask *= 2) x = arch::max(x, ptx::shuffle_xor(x, mask));
    if (arch::lane() == 0) p.workspace[slot] = x;
  }

 private:
  static METHOD float of_gradients(i64 head, i32 part, P const& p) {
    if constexpr (backward) {
      if (head < Heads::grad_lse(p))
        return of_rows<C::head_dim_v>(p.grad_out, head - Heads::grad_out(p), p.heads_q, p.grad_out_batch,
                                      p.grad_out_head, p.grad_out_row, p.grad_out_dim, p.seq_q, part);
      float most = 0.0f;
      if (p.grad_lse)
        each(p.seq_q, part,
             [&](i64 i) { most = arch::max(most, size(p.grad_lse[(head - Heads::grad_lse(p)) * p.seq_q + i])); });
      return most;
    }
    return 0.0f;
  }

  // Rows are read `bytes` at a time.
  static constexpr i32 bytes = base::most(C::vector, (i32)sizeof(E)), elements = bytes / (i32)sizeof(E);

  template <i32 columns>
  static METHOD float of_rows(const E* x, i64 head, i64 heads, i64 batch_stride, i64 head_stride, i64 stride, i64 step,
                              i64 rows, i32 part) {
    constexpr i32 pieces = base::ceil_div(columns, elements);
    const auto view = rows_view(x, head / heads, batch_stride, head % heads, head_stride, 0, stride, step);
    float most = 0.0f;
    each(rows * pieces, part, [&](i64 i) {
      const i32 first = (i32)(i % pieces) * elements;
      const E* at = view.row(i / pieces);
      if (first + elements <= columns) {
        const Words4 words = ptx::load_global<bytes>(at + first * step);
#pragma unroll
        for (i32 e = 0; e < elements; ++e) most = arch::max(most, size(arch::element<E>(words, e)));
      } else {
        for (i32 e = first; e < columns; ++e) most = arch::max(most, size(arch::widen(at[e * step])));
      }
    });
    return most;
  }

  // f(i) for the part's share of `count`, a lane at a time.
  template <class F>
  static METHOD void each(i64 count, i32 part, F f) {
    const i64 share = base::ceil_div(count, (i64)Heads::parts), end = base::least(count, (part + 1) * share);
#pragma unroll 4
    for (i64 i = part * share + arch::lane(); i < end; i += 32) f(i);
  }

  static METHOD float size(float x) {
    const float y = arch::max(x, -x);
    return y < base::infinity ? y : 0.0f;
  }
};

template <class C, class P>
struct Largest : LargestOf<C, P, false> {};
template <class C, class P>
struct LargestOfBackward : LargestOf<C, P, true> {};

}  // namespace attn
