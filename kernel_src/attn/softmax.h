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

// Products -> scores -> exponents. As a rule the scale is part of the one multiply-add that makes an exponent. That
// rounds what is subtracted, but not what it is subtracted from: beyond 2^30 the difference is all that counts, and
// products must be scaled before.
struct Scaling {
  float scale;
  bool early = false;
  METHOD explicit Scaling(float scale) : scale(softmax_scale(scale)) {}
  METHOD float of_products() const { return early ? scale : 1.0f; }
  METHOD float of_scores() const { return early ? 1.0f : scale; }
};

template <class C>
struct OnlineSoftmax {
  struct Statistic {
    arch::Value anchor;  // what is subtracted before exp2: near the largest scaled score, -inf while no key was visible
    arch::Value total;   // sum of exp2(score * scale - anchor)
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
    arch::share_max(best);
    const auto factor = raise(best, scale);
    weigh(scores, scale);
    return factor;
  }
  // The same where every product is a score and each row's largest is known.
  METHOD arch::PerRow<C, arch::Value> update(arch::Scores<C>& scores, arch::PerRow<C, arch::Value> const& top,
                                             float scale) {
    arch::PerRow<C, Best> best;
    for (i32 i = 0; i < best.slots; ++i) best.slot[i].top = top.slot[i];
    const auto factor = raise(best, scale);
    weigh(scores, scale);
    return factor;
  }

  struct Best {
    arch::Value top;  // the largest score of a tile, not scaled
  };

  // The steps of an update: the largest score of every row; the anchors that follow; weights.
  METHOD arch::PerRow<C, Best> look(arch::Scores<C>& scores) {
    arch::PerRow<C, Best> best = none();
    scores.each(best, [](Best& b, auto, auto, arch::Value& x) { b.top = arch::max(b.top, x); });
    arch::share_max(best);
    return best;
  }
  METHOD arch::PerRow<C, arch::Value> raise(arch::PerRow<C, Best> const& best, float scale) {
    arch::PerRow<C, arch::Value> factor;
    for (i32 i = 0; i < factor.slots; ++i) {
      auto& s = rows.slot[i];
      const auto before = s.anchor, top = best.slot[i].top * scale;
      // While weights stay below 2^8 the anchor stays too, and earlier sums as they are.
      s.anchor = arch::select(top > before + 8.0f, top, before);
      // 0 from the first visible key on: there are no sums before it.
      factor.slot[i] = arch::exp2(before - finite(s.anchor));
      s.total *= factor.slot[i];
    }
    return factor;
  }
  METHOD void weigh(arch::Scores<C>& scores, float scale) {
    arch::PerRow<C, Statistic> now;
    for (i32 i = 0; i < now.slots; ++i) now.slot[i] = {finite(rows.slot[i].anchor), arch::splat(0.0f)};
    scores.each(now, [&](Statistic& s, auto, auto, arch::Value& x) {
      x = arch::exp2(x * scale - s.anchor);
      s.total += x;
    });
    for (i32 i = 0; i < now.slots; ++i) rows.slot[i].total += now.slot[i].total;
  }

  // After the last tile: whether products had to be scaled before.
  METHOD bool coarse() const {
    bool any = false;
    for (const auto& row : rows.slot) {
      const auto size = arch::max(row.anchor, -row.anchor);
      any = any || arch::any((size > 0x1p26f) & (size < base::infinity));
    }
    return any;
  }

  // After the last tile: totals of whole rows.
  METHOD void gather() { arch::share_sum(rows); }
  // Then 1 / total (0 for a row that saw nothing), and the natural-log LSE (-inf for such a row).
  METHOD arch::PerRow<C, arch::Value> finish(arch::PerRow<C, arch::Value>& lse) const {
    arch::PerRow<C, arch::Value> inverse;
    for (i32 i = 0; i < rows.slots; ++i) {
      const auto& s = rows.slot[i];
      inverse.slot[i] = arch::select(s.total == 0.0f, arch::splat(0.0f), 1.0f / s.total);
      lse.slot[i] = (s.anchor + arch::log2(s.total)) * base::ln_2;
    }
    return inverse;
  }

 private:
  static METHOD arch::PerRow<C, Best> none() {
    arch::PerRow<C, Best> best;
    for (auto& row : best.slot) row.top = arch::splat(-base::infinity);
    return best;
  }
  static METHOD arch::Value finite(arch::Value anchor) {
    return arch::select(anchor == -base::infinity, arch::splat(0.0f), anchor);
  }
};

}  // namespace attn
