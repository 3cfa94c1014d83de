// Floats as operands: each is the sum of a float16 number and 2^-11 times another, which together have the 22 leading
// bits that two TF32 numbers would have, for products that take half the time (Ootomo and Yokota 2022). Exponents of
// float16 reach less far: a head's elements are first multiplied by a power of two (attn/magnitude.h).
#pragma once
#include "mma.h"

namespace arch {

constexpr float low_unit = 1.0f / 2048;  // what the second numbers count

struct Halves {
  u32 high, low;  // two numbers each
};
FN Halves halves(float x, float y) {
  const u32 high = ptx::pack_f16(x, y);
  const float x_left = x - ptx::float_of_f16((u16)high), y_left = y - ptx::float_of_f16((u16)(high >> 16));
  return {high, ptx::pack_f16(x_left * (1 / low_unit), y_left * (1 / low_unit))};
}

template <>
struct Operand<float> {
  Operand<f16> high, low;
};

// c += a b for one half of b, in two sums: what counts whole, and what counts low_unit. The product of the low numbers
// is below a float's last bit.
template <i32 half>
FN void multiply_add(float (&whole)[4], float (&low)[4], Operand<float> const& a, Operand<float> const& b) {
  multiply_add<half>(low, a.low, b.high);
  multiply_add<half>(low, a.high, b.low);
  multiply_add<half>(whole, a.high, b.high);
}

}  // namespace arch
