// Matrix products of a warp. The layout is that of ptx.h's products.
#pragma once
#include "operand.h"
#include "ptx.h"

namespace arch {

// c += a b for one half of b: columns 0 to 7 or 8 to 15.
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<bf16> const& a, Operand<bf16> const& b) {
  ptx::mma_bf16(c, a.word, {b.word[2 * half], b.word[2 * half + 1]});
}
template <i32 half>
FN void multiply_add(float (&c)[4], Operand<f16> const& a, Operand<f16> const& b) {
  ptx::mma_f16(c, a.word, {b.word[2 * half], b.word[2 * half + 1]});
}

}  // namespace arch
