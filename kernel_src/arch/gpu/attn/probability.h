// Scores -> probabilities of a backward pass, of an LSE in base 2 for each row slot of a lane.
#pragma once
#include "tile.h"

namespace attn {

template <class Scores, i32 slots>
FN void make_probabilities(Scores& scores, float scale, const float (&lse)[slots]) {
  bool moderate = true;
#pragma unroll
  for (i32 i = 0; i < slots; ++i) moderate = moderate && lse[i] < 4e6f && lse[i] > -4e6f;
  if (moderate) {
    scores.each_slot([&](i32 slot, i32, i32, float& x) { x = arch::exp2(x * scale - lse[slot]); });
  } else {
    // The LSE is rounded, by more than 1 where scores are beyond 2^24: no probability is for that.
    scores.each_slot([&](i32 slot, i32, i32, float& x) { x = arch::exp2(arch::min(0.0f, x * scale - lse[slot])); });
  }
}

}  // namespace attn
