// Vectors of the host CPU, through the vector types that GCC and Clang share: no header, no intrinsic names.
#pragma once
#include "base/math.h"
#include "qualifiers.h"

namespace arch {

#if defined(__AVX512F__)
constexpr i32 lanes = 16;
#elif defined(__AVX2__)
constexpr i32 lanes = 8;
#else
constexpr i32 lanes = 4;
#endif

typedef float Value __attribute__((vector_size(4 * lanes), may_alias));
typedef i32 Index __attribute__((vector_size(4 * lanes), may_alias));
typedef u32 Bits __attribute__((vector_size(4 * lanes), may_alias));
typedef u16 HalfBits __attribute__((vector_size(2 * lanes), may_alias));
typedef Value UnalignedValue __attribute__((aligned(4)));
typedef Bits UnalignedBits __attribute__((aligned(2)));
typedef HalfBits UnalignedHalfBits __attribute__((aligned(2)));

FN Value splat(float x) { return x - Value{}; }
FN Index splat(i32 x) { return x - Index{}; }
// A NaN in b is kept. GCC makes two instructions of the comparison where one side is a constant.
FN Value max(Value a, Value b) {
#if defined(__AVX__)
  Value x;
  asm("vmaxps %2, %1, %0" : "=v"(x) : "v"(a), "vm"(b));
  return x;
#else
  return a > b ? a : b;
#endif
}
FN Value min(Value a, Value b) {
#if defined(__AVX__)
  Value x;
  asm("vminps %2, %1, %0" : "=v"(x) : "v"(a), "vm"(b));
  return x;
#else
  return a < b ? a : b;
#endif
}
FN Value select(Index condition, Value yes, Value no) { return condition ? yes : no; }
FN bool any(Index condition) {
  i32 x = 0;
  for (i32 i = 0; i < lanes; ++i) x |= condition[i];
  return x;
}

FN Index iota() {
  Index x;
  for (i32 i = 0; i < lanes; ++i) x[i] = i;
  return x;
}

// 2^x for x < 128: a degree-6 minimax polynomial around the nearest integer, relative error below 7.3e-8.
// Below -126.5 the result is an exact 0, also for -inf; NaN stays NaN; exp2(0) is exactly 1.
FN Value exp2(Value x) {
  x = max(splat(-127.0f), x);
  const float magic = 12583039.0f;  // 1.5 * 2^23 + 127: adding it rounds to an integer, and biases it as an exponent
  const Value shifted = x + magic;
  const Value r = x - (shifted - magic);
  Value y = splat(1.534581097e-4f);
  y = y * r + 1.339993090e-3f;
  y = y * r + 9.618489072e-3f;
  y = y * r + 5.550328642e-2f;
  y = y * r + 2.402264625e-1f;
  y = y * r + 6.931471825e-1f;
  y = y * r + 1.0f;
  return y * (Value)((Bits)shifted << 23);
}

FN Value log2(Value x) {
  for (i32 i = 0; i < lanes; ++i) x[i] = __builtin_log2f(x[i]);
  return x;
}

// A vector's lanes interleaved with another's: low half, high half.
template <i32... I>
struct Lanes {};
template <i32 N, i32... I>
struct Range : Range<N - 1, N - 1, I...> {};
template <i32... I>
struct Range<0, I...> {
  using type = Lanes<I...>;
};

// One stage of a transpose exchanges blocks of `step` lanes between two rows.
template <i32 step, class V, i32... I>
FN V exchange_low(V a, V b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, ((I & step) ? lanes + I - step : I)...);
}
template <i32 step, class V, i32... I>
FN V exchange_high(V a, V b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, ((I & step) ? lanes + I : I + step)...);
}
template <i32 step, class V>
FN void transpose_stage(V (&rows)[lanes]) {
  if constexpr (step > 0) {
#pragma GCC unroll 16
    for (i32 i = 0; i < lanes; ++i)
      if (!(i & step)) {
        const V a = rows[i], b = rows[i + step];
        rows[i] = exchange_low<step>(a, b, typename Range<lanes>::type{});
        rows[i + step] = exchange_high<step>(a, b, typename Range<lanes>::type{});
      }
    transpose_stage<step / 2>(rows);
  }
}
template <class V>
FN void transpose(V (&rows)[lanes]) {
  transpose_stage<lanes / 2>(rows);
}

template <class V, i32... I>
FN V interleave_low(V a, V b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + (I & 1) * lanes)...);
}
template <class V, i32... I>
FN V interleave_high(V a, V b, Lanes<I...>) {
  return __builtin_shufflevector(a, b, (lanes / 2 + I / 2 + (I & 1) * lanes)...);
}

}  // namespace arch
