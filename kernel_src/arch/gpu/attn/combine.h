// The output from those of the splits of the keys: each weighs exp(its LSE - the LSE of all).
#pragma once
#include "attn/layout.h"
#include "attn/workspace.h"

namespace attn {

template <class C, class P>
struct Combine {
  using E = typename C::Element;
  using Partial = PartialOut<C, P>;
  struct Memory {};

  // A warp makes a row.
  static METHOD void run(i32 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p, 1);
    const auto out = rows_view(p.out, b.batch, p.out_batch, b.head, p.out_head, b.first, p.out_row, 1);
    for (i32 i = arch::warp(); i < b.rows; i += C::warps) {
      const i64 row = Partial::row(b, p) + i;
      float top = -base::infinity;
      for (i32 split = 0; split < p.splits; ++split) top = arch::max(top, *Partial::lse(split, row, p));
      const float anchor = top == -base::infinity ? 0.0f : top;
      float total = 0.0f, sums[columns] = {};
      for (i32 split = 0; split < p.splits; ++split) {
        const float weight = arch::exp2((*Partial::lse(split, row, p) - anchor) * base::log2_e);
        const float* from = Partial::out(split, row, p);
        total += weight;
#pragma unroll
        for (i32 j = 0; j < columns; ++j)
          if (column(j) < C::head_dim_v) sums[j] += weight * from[column(j)];
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
      for (i32 j = 0; j < columns; ++j)
        if (column(j) < C::head_dim_v) out.row(i)[column(j)] = arch::narrow(E{}, sums[j] * inverse);
      if (arch::lane() == 0) p.lse[row] = anchor + arch::log2(total) * base::ln_2;
    }
  }

 private:
  static constexpr i32 columns = base::ceil_div(C::head_dim_v, 32);  // of a lane
  static METHOD i32 column(i32 j) { return j * 32 + arch::lane(); }
};

}  // namespace attn
