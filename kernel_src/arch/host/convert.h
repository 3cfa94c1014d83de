// float32 <-> the 16-bit formats, a vector at a time.
#pragma once
#include "simd.h"

namespace arch {

FN Value widen(HalfBits h, bf16) { return (Value)(__builtin_convertvector(h, Bits) << 16); }

FN Value widen(HalfBits h, f16) {
#if defined(__F16C__)
  Value x;
  asm("vcvtph2ps %1, %0" : "=v"(x) : "v"(h));
  return x;
#else
  const Bits bits = __builtin_convertvector(h, Bits);
  // Exponents are rebiased by a multiplication, which also normalises subnormals.
  Bits x = (Bits)((Value)((bits & 0x7fffu) << 13) * 5.192296858534828e33f);
  x = (bits & 0x7c00u) == 0x7c00u ? (x | 0x7f800000u) : x;
  return (Value)(x | (bits & 0x8000u) << 16);
#endif
}

// Round to nearest even; NaN stays a (quiet) NaN.
FN HalfBits narrow(Value x, bf16) {
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16 | 0x40u), HalfBits);
}

FN HalfBits narrow(Value x, f16) {
#if defined(__F16C__)
  HalfBits h;
  asm("vcvtps2ph $0, %1, %0" : "=v"(h) : "v"(x));
  return h;
#else
  const Bits bits = (Bits)x, magnitude = bits & 0x7fffffffu;
  const Bits normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  // Adding 0.5 aligns a subnormal's last bit with the float's own rounding position.
  const Bits subnormal = (Bits)((Value)magnitude + 0.5f) - 0x3f000000u;
  Bits h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477ff000u ? (h & 0u) + 0x7c00u : h;
  h = magnitude > 0x7f800000u ? (h & 0u) + 0x7e00u : h;
  return __builtin_convertvector(h | (bits >> 16 & 0x8000u), HalfBits);
#endif
}

// `lanes` consecutive elements as float32.
FN Value load(const float* p) { return *(const UnalignedValue*)p; }
template <class Half>
FN Value load(const Half* p) {
  return widen(*(const UnalignedHalfBits*)p, Half{});
}
FN void store(float* p, Value x) { *(UnalignedValue*)p = x; }
template <class Half>
FN void store(Half* p, Value x) {
  *(UnalignedHalfBits*)p = narrow(x, Half{});
}

#if defined(__AVX512BF16__)
typedef u16 HalfPairs __attribute__((vector_size(4 * lanes), may_alias));

// 2 * lanes bfloat16: those of `low`, then those of `high`.
FN Bits narrow_both(Value low, Value high) {
  Bits x;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(x) : "v"(high), "v"(low));
  return x;
}
template <i32... I>
FN Bits alternate(Bits x, Lanes<I...>) {
  return (Bits)__builtin_shufflevector((HalfPairs)x, (HalfPairs)x, (I / 2 + (I & 1) * lanes)...);
}
// lanes pairs (low[i], high[i]) of bfloat16.
FN Bits narrow_pairs(Value low, Value high) {
  return alternate(narrow_both(low, high), typename Range<2 * lanes>::type{});
}
#endif

// One row of `size` float32 sums, times a factor, to memory.
template <i32 size, class T>
FN void store_row(T* to, i64 step, const float* from, float factor) {
  for (i32 d = 0; d < size; d += lanes) {
    const Value x = *(const Value*)(from + d) * factor;
    if (d + lanes <= size && step == 1) {
      store(to + d, x);
    } else {
      alignas(64) T part[lanes];
      store(part, x);
      for (i32 i = 0; i < lanes && d + i < size; ++i) to[(d + i) * step] = part[i];
    }
  }
}

}  // namespace arch
