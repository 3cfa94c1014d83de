// The number formats and the matrix products.
#pragma once
#include <math.h>
#include "block.h"

namespace engine {

inline u32 bits(float x) {
  u32 y;
  memcpy(&y, &x, 4);
  return y;
}
inline float real(u32 x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

// The fraction without its `dropped` last bits, rounded to nearest even.
inline u32 rounded(u32 x, u32 dropped) { return (x + (1u << (dropped - 1)) - 1 + (x >> dropped & 1)) >> dropped; }

inline u16 bf16_of(float x) { return isnan(x) ? 0x7fff : (u16)rounded(bits(x), 16); }

inline u16 f16_of(float x) {
  const u32 sign = bits(x) >> 16 & 0x8000, size = bits(x) & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= bits(65520.0f)) return (u16)(sign | 0x7c00);
  // Below the smallest normal number the format's last bit is 2^-24: an addition rounds there.
  if (size < bits(0x1p-14f)) return (u16)(sign | (bits(real(size) + 0.5f) - bits(0.5f)));
  return (u16)(sign | (rounded(size, 13) - (112u << 10)));
}
inline float float_of_f16(u16 x) {
  const u32 sign = (u32)(x & 0x8000) << 16, size = x & 0x7fff;
  if (size >= 0x7c00) return real(sign | 0x7f800000 | (size & 0x3ff) << 13);
  if (size < 0x400) return real(sign | bits((float)size * 0x1p-24f));
  return real(sign | ((size << 13) + (112u << 23)));
}

// A double's first 24 significant bits.
inline double cut(double x) {
  uint64_t y;
  memcpy(&y, &x, 8);
  y &= ~((1ull << 29) - 1);
  memcpy(&x, &y, 8);
  return x;
}

// What the lanes give to a product, as matrices. With g = lane / 4 and t = lane % 4, a word of 16-bit elements holds
// columns 2 t and 2 t + 1 of row g of a (or rows of column g of b). The odd words of a lie 8 rows further, the upper
// half of the words half of the columns of a and rows of b further.
template <emulator::Format format>
struct Operands {
  static constexpr u32 k = format == emulator::Format::f16_k8 ? 8 : 16, b_words = k / 8;
  double a[16][k], b[k][8];  // exact, as their products will be

  explicit Operands(const Exchange (&in)[lanes]) {
    for (u32 lane = 0; lane < lanes; ++lane) {
      const u32 g = lane / 4, t = lane % 4, *a_word = in[lane].word + 4, *b_word = in[lane].word + 8;
      for (u32 i = 0; i < b_words; ++i)
        for (u32 e = 0; e < 2; ++e) {
          const u32 at = 8 * i + 2 * t + e;
          a[g][at] = element(a_word[2 * i], e);
          a[g + 8][at] = element(a_word[2 * i + 1], e);
          b[at][g] = element(b_word[i], e);
        }
    }
  }
  static float element(u32 word, u32 e) {
    const u16 half = (u16)(word >> 16 * e);
    return format == emulator::Format::bf16 ? real((u32)half << 16) : float_of_f16(half);
  }
};

// sums[n] += a[0 .. k) b[0 .. k)[n], where rows of b are `ld` apart.
//
// The tensor cores add a few exact products to a sum and cut off what does not fit a float32 (Fasi et al. 2021; Ootomo
// and Yokota 2022): 8 products of 16-bit elements on sm_80, more at a time on newer ones. So does this, because
// kernels must be good enough with such sums. Sums are exact here before they are cut.
inline void add_products(double* __restrict__ sums, const double* a, const double* b, u32 k, u32 columns, u32 ld) {
  constexpr u32 at_once = 8;
  for (u32 first = 0; first < k; first += at_once) {
    for (u32 i = first; i < first + at_once; ++i)
      for (u32 n = 0; n < columns; ++n) sums[n] += a[i] * b[i * ld + n];
    for (u32 n = 0; n < columns; ++n) sums[n] = cut(sums[n]);
  }
}

template <emulator::Format format>
void multiply_add(const Exchange (&in)[lanes], Words4 (&out)[lanes]) {
  const Operands<format> x(in);
  double c[16][8];
  for (u32 lane = 0; lane < lanes; ++lane)
    for (u32 i = 0; i < 4; ++i) c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = real(in[lane].word[i]);
  for (u32 row = 0; row < 16; ++row) add_products(c[row], x.a[row], x.b[0], x.k, 8, 8);
  for (u32 lane = 0; lane < lanes; ++lane)
    for (u32 i = 0; i < 4; ++i) out[lane].word[i] = bits((float)c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

}  // namespace engine
