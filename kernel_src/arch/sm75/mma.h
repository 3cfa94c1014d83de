// Matrix products of a warp on Turing: two products of 8 along the contraction.
#pragma once
#include "operand.h"
#include "ptx.h"

namespace arch {

template <i32 half>
FN void multiply_add(float (&c)[4], Operand<f16> const& a, Operand<f16> const& b) {
  ptx::mma_f16_k8(c, a.word[0], a.word[1], b.word[2 * half]);
  ptx::mma_f16_k8(c, a.word[2], a.word[3], b.word[2 * half + 1]);
}

}  // namespace arch
