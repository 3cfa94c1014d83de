// Softmax over keys that arrive tile by tile (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2: scores come
// multiplied by log2(e), so that exp2 is the only transcendental function.
#pragma once
#include "tile.h"

namespace attn {

template <class C>
struct OnlineSoftmax {
  struct Statistic {
    arch::Value top;     // the largest score so far
    arch::Value anchor;  // what is subtracted before exp2: top, or 0 while no key was visible
    arch::Value total;   // sum of exp2(score - anchor)
  };
  arch::PerRow<C, Statistic> rows;

  METHOD void start() {
    for (auto& row : rows.slot) row = {arch::splat(-base::infinity), arch::splat(0.0f), arch::splat(0.0f)};
  }

  // Scores -> weights. `score(row, column, x)` gives the final score. Returns what earlier sums must be multiplied by.
  template <class F>
  METHOD arch::PerRow<C, arch::Value> update(arch::Scores<C>& scores, F score) {
    arch::PerRow<C, Statistic> now = rows;
    scores.each(now, [&](Statistic& s, auto row, auto column, arch::Value& x) {
      x = score(row, column, x);
      s.top = arch::max(s.top, x);
    });
    arch::share_max(now);
    arch::PerRow<C, arch::Value> factor;
    for (i32 i = 0; i < now.slots; ++i) {
      auto& s = now.slot[i];
      s.anchor = arch::select(s.top == -base::infinity, arch::splat(0.0f), s.top);
      factor.slot[i] = arch::exp2(rows.slot[i].top - s.anchor);
      s.total = arch::splat(0.0f);
    }
    scores.each(now, [&](Statistic& s, auto, auto, arch::Value& x) {
      x = arch::exp2(x - s.anchor);
      s.total += x;
    });
    for (i32 i = 0; i < now.slots; ++i) now.slot[i].total += rows.slot[i].total * factor.slot[i];
    rows = now;
    return factor;
  }

  // After the last tile: 1 / total (0 for a row that saw nothing), and the natural-log LSE (-inf for such a row).
  METHOD arch::PerRow<C, arch::Value> finish(arch::PerRow<C, arch::Value>& lse) {
    arch::share_sum(rows);
    arch::PerRow<C, arch::Value> inverse;
    for (i32 i = 0; i < rows.slots; ++i) {
      const auto& s = rows.slot[i];
      inverse.slot[i] = arch::select(s.total == 0.0f, arch::splat(0.0f), 1.0f / s.total);
      lse.slot[i] = (s.anchor + arch::log2(s.total)) * base::ln_2;
    }
    return inverse;
  }
};

}  // namespace attn
