// Softmax over keys that arrive tile by tile (Milakov and Gimelshein 2018; Dao et al. 2022), in base 2: the scale that
// scores are multiplied by contains log2(e), so that exp2 is the only transcendental function.
#pragma once
#include "tile.h"

namespace attn {

// |scale| log2(e) as the softmax takes it. It must be positive: the largest score is then also the largest scaled one,
// and a score of -inf stays -inf. Whoever has a negative scale negates the queries; instead of 0 it is the smallest
// number that is not subnormal.
FN float softmax_scale(float scale) {
  return base::most(base::smallest, (scale < 0.0f ? -scale : scale) * base::log2_e);  // a NaN is kept
}

template <class C>
struct OnlineSoftmax {
  struct Statistic {
    arch::Value anchor;  // what is subtracted before exp2: near the largest score, -inf while no key was visible
    arch::Value total;   // sum of exp2((score - anchor) * scale)
  };
  arch::PerRow<C, Statistic> rows;

  METHOD void start() {
    for (auto& row : rows.slot) row = {arch::splat(-base::infinity), arch::splat(0.0f)};
  }

  // Scores -> weights. `scale` is positive; `score(row, column, x)` gives a score from a product, -inf for none.
  // Returns what earlier sums must be multiplied by.
  template <class F>
  METHOD arch::PerRow<C, arch::Value> update(arch::Scores<C>& scores, float scale, F score) {
    arch::PerRow<C, Best> best = none();
    scores.each(best, [&](Best& b, auto row, auto column, arch::Value& x) {
      x = score(row, column, x);
      b.top = arch::max(b.top, x);
    });
    const auto factor = raise(best, scores, scale);
    weigh(scores, scale);
    return factor;
  }
  // The same where every product is a score and each row's largest is known.
  METHOD arch::PerRow<C, arch::Value> update(arch::Scores<C>& scores, arch::PerRow<C, arch::Value> const& top,
                                             float scale) {
    arch::PerRow<C, Best> best;
    for (i32 i = 0; i < best.slots; ++i) best.slot[i].top = top.slot[i];
    const auto factor = raise(best, scores, scale);
    weigh(scores, scale);
    return factor;
  }

  // The two passes of an update: the first looks for larger scores, the second makes weights.
  METHOD arch::PerRow<C, arch::Value> raise(arch::Scores<C>& scores, float scale) {
    arch::PerRow<C, Best> best = none();
    scores.each(best, [](Best& b, auto, auto, arch::Value& x) { b.top = arch::max(b.top, x); });
    return raise(best, scores, scale);
  }
  METHOD void weigh(arch::Scores<C>& scores, float scale) {
    arch::PerRow<C, Sum> now;
    for (i32 i = 0; i < now.slots; ++i) now.slot[i] = {scaled_anchor(rows.slot[i], scale), arch::splat(0.0f)};
    scores.each(now, [&](Sum& s, auto, auto, arch::Value& x) {
      x = arch::exp2(x * scale - s.anchor);
      s.total += x;
    });
    for (i32 i = 0; i < now.slots; ++i) rows.slot[i].total += now.slot[i].total;
  }

  // After the last tile: 1 / total (0 for a row that saw nothing), and the natural-log LSE (-inf for such a row).
  METHOD arch::PerRow<C, arch::Value> finish(arch::PerRow<C, arch::Value>& lse, float scale) {
    arch::share_sum(rows);
    arch::PerRow<C, arch::Value> inverse;
    for (i32 i = 0; i < rows.slots; ++i) {
      const auto& s = rows.slot[i];
      inverse.slot[i] = arch::select(s.total == 0.0f, arch::splat(0.0f), 1.0f / s.total);
      lse.slot[i] = (s.anchor * scale + arch::log2(s.total)) * base::ln_2;
    }
    return inverse;
  }

 private:
  struct Best {
    arch::Value top;  // the largest score of a tile
  };
  struct Sum {
    arch::Value anchor;  // scaled
    arch::Value total;
  };
  static METHOD arch::PerRow<C, Best> none() {
    arch::PerRow<C, Best> best;
    for (auto& row : best.slot) row.top = arch::splat(-base::infinity);
    return best;
  }
  static METHOD arch::Value finite(arch::Value anchor) {
    return arch::select(anchor == -base::infinity, arch::splat(0.0f), anchor);
  }

  // Where scaling rounds an anchor by a good part of 1, what it is subtracted from must be rounded the same way.
  static METHOD auto coarse(arch::Value scaled) {
    const auto size = arch::max(scaled, -scaled);
    return (size > 4e6f) & (size < base::infinity);
  }
  // Scores of such rows become differences from the anchor, whose part in their weights is then 0.
  METHOD void subtract_coarse(arch::Scores<C>& scores, float scale) {
    bool any = false;
    for (auto& row : rows.slot) any = any || arch::any(coarse(row.anchor * scale));
    if (any)
      scores.each(rows, [&](Statistic& s, auto, auto, arch::Value& x) {
        x = arch::select(coarse(s.anchor * scale), x - s.anchor, x);
      });
  }
  static METHOD arch::Value scaled_anchor(Statistic const& s, float scale) {
    const auto scaled = finite(s.anchor) * scale;
    return arch::select(coarse(scaled), arch::splat(0.0f), scaled);
  }

  METHOD arch::PerRow<C, arch::Value> raise(arch::PerRow<C, Best>& best, arch::Scores<C>& scores, float scale) {
    arch::share_max(best);
    arch::PerRow<C, arch::Value> factor;
    for (i32 i = 0; i < factor.slots; ++i) {
      auto& s = rows.slot[i];
      const auto before = s.anchor, top = best.slot[i].top;
      // While weights stay below 2^8 the anchor stays too, and earlier sums as they are.
      s.anchor = arch::select((top - before) * scale > 8.0f, top, before);
      // 0 from the first visible key on: there are no sums before it.
      factor.slot[i] = arch::exp2((before - finite(s.anchor)) * scale);
      s.total *= factor.slot[i];
    }
    subtract_coarse(scores, scale);
    return factor;
  }
};

}  // namespace attn
