// Products of floats for GPUs whose matrix units take none: lanes hand their operands round, in the layout of ptx.h's
// TF32 products.
#pragma once
#include "operand.h"
#include "ptx.h"

namespace arch {

// c += a b for one half of b: columns 0 to 7 or 8 to 15.
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<float> const& a, Operand<float> const& b) {
  const i32 lane = (i32)ptx::thread_index() % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll 1  // unrolled, it would take most of a minute to compile
  for (i32 k = 0; k < 8; ++k) {
    const float above = ptx::real(ptx::shuffle(k < 4 ? a.word[0] : a.word[2], row + k % 4));
    const float below = ptx::real(ptx::shuffle(k < 4 ? a.word[1] : a.word[3], row + k % 4));
    const u32 b_word = k < 4 ? b.word[2 * half] : b.word[2 * half + 1];
    const float first = ptx::real(ptx::shuffle(b_word, column + k % 4));
    const float second = ptx::real(ptx::shuffle(b_word, column + 4 + k % 4));
    c[0] += above * first, c[1] += above * second;
    c[2] += below * first, c[3] += below * second;
  }
}

}  // namespace arch
