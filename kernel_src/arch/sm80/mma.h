// Matrix products of a warp. The layout is that of ptx.h's products.
#pragma once
#include "operand.h"
#include "ptx.h"

namespace arch {

// A float as the sum of two numbers that the TF32 products take whole.
template <>
struct Operand<float> {
  static constexpr u32 half = 1 << 12;  // of the last bit that a TF32 product looks at
  u32 high[4], low[4];
  METHOD void set(const u32 (&words)[4]) {
    for (i32 i = 0; i < 4; ++i) {
      high[i] = (words[i] + half) & ~(2 * half - 1);
      low[i] = ptx::bits(ptx::real(words[i]) - ptx::real(high[i])) + half;  // products drop the bits below
    }
  }
};

// c += a b for one half of b: columns 0 to 7 or 8 to 15.
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<bf16> const& a, Operand<bf16> const& b) {
  ptx::mma_bf16(c, a.word, {b.word[2 * half], b.word[2 * half + 1]});
}
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<f16> const& a, Operand<f16> const& b) {
  ptx::mma_f16(c, a.word, {b.word[2 * half], b.word[2 * half + 1]});
}
// Three of the four products of the parts; what the fourth would add is below a float's last bit (3xTF32). The small
// ones come first.
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<float> const& a, Operand<float> const& b) {
  ptx::mma_tf32(c, a.low, {b.high[2 * half], b.high[2 * half + 1]});
  ptx::mma_tf32(c, a.high, {b.low[2 * half], b.low[2 * half + 1]});
  ptx::mma_tf32(c, a.high, {b.high[2 * half], b.high[2 * half + 1]});
}

}  // namespace arch
