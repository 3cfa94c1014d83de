// Constants and integer helpers.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

namespace base {

constexpr float log2_e = 1.44269504088896341f;
constexpr float ln_2 = 0.693147180559945309f;
constexpr float smallest = 1.17549435e-38f;  // positive and not subnormal
constexpr float infinity = INFINITE_FLOAT;

template <class T>
constexpr T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T most(T a, T b) {
  return a > b ? a : b;
}
template <class T>
constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}
constexpr i32 round_up(i32 a, i32 b) { return ceil_div(a, b) * b; }

}  // namespace base
