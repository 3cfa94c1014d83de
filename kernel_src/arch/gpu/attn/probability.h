// Probabilities that a backward pass makes of scores and an LSE.
#pragma once
#include "base/math.h"

namespace attn {

// Whether one of these LSEs, in base 2, is rounded by a good part of 1: a probability may then come out above 1.
template <i32 count>
FN bool any_coarse(const float (&lse)[count]) {
  bool any = false;
#pragma unroll
  for (i32 i = 0; i < count; ++i) any |= (lse[i] > 4e6f && lse[i] < base::infinity) || lse[i] < -4e6f;
  return any;
}

// 0 for a hidden key; a NaN is kept.
FN float corrected(float probability, bool hidden) { return hidden ? 0.0f : probability > 1.0f ? 1.0f : probability; }

}  // namespace attn
