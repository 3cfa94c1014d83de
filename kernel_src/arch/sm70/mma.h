// Matrix products of a warp on Volta, without its matrix units: lanes hand their operands round, in the layout of
// ptx.h's products.
#pragma once
#include "operand.h"
#include "ptx.h"

namespace arch {

template <i32 half>
FN void multiply_add(float (&c)[4], Operand<f16> const& a, Operand<f16> const& b) {
  const i32 lane = (i32)ptx::thread_index() % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll 1                          // unrolled, it would take most of a minute to compile
  for (i32 pair = 0; pair < 8; ++pair) {  // of neighbours along the contraction
    const i32 from = pair % 4;
    const u32 above = ptx::shuffle(pair < 4 ? a.word[0] : a.word[2], row + from);
    const u32 below = ptx::shuffle(pair < 4 ? a.word[1] : a.word[3], row + from);
    const u32 b_word = pair < 4 ? b.word[2 * half] : b.word[2 * half + 1];
    const u32 first = ptx::shuffle(b_word, column + from), second = ptx::shuffle(b_word, column + 4 + from);
#pragma unroll
    for (i32 shift = 0; shift < 32; shift += 16) {
      const float x = ptx::float_of_f16((u16)(above >> shift)), y = ptx::float_of_f16((u16)(below >> shift));
      const float u = ptx::float_of_f16((u16)(first >> shift)), v = ptx::float_of_f16((u16)(second >> shift));
      c[0] += x * u, c[1] += x * v;
      c[2] += y * u, c[3] += y * v;
    }
  }
}

}  // namespace arch
