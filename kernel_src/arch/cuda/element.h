// The element types as the tiles take them.
#pragma once
#include "base/types.h"
#include "ptx.h"

namespace arch {

// Where and what a score is: a lane holds one at a time.
using Value = float;
using Index = i32;

FN Value splat(float x) { return x; }
FN Value select(bool condition, Value a, Value b) { return condition ? a : b; }
FN bool any(bool condition) { return condition; }
FN Value max(Value a, Value b) { return fmaxf(a, b); }
FN Value exp2(Value x) { return ptx::exp2(x); }
FN Value log2(Value x) { return ptx::log2(x); }

// A word of neighbouring elements: two of 16 bits, or one float.
FN u32 pack(bf16, float low, float high) { return ptx::pack_bf16(low, high); }
FN u32 pack(f16, float low, float high) { return ptx::pack_f16(low, high); }

FN bf16 narrow(bf16, float x) { return {(u16)ptx::pack_bf16(x, 0.0f)}; }
FN f16 narrow(f16, float x) { return {(u16)ptx::pack_f16(x, 0.0f)}; }
FN float narrow(float, float x) { return x; }
FN float widen(bf16 x) { return ptx::real((u32)x.bits << 16); }
FN float widen(f16 x) { return ptx::float_of_f16(x.bits); }
FN float widen(float x) { return x; }

// Element i of what was loaded at once, and what is stored at once.
template <class E>
FN float element(Words4 const& words, i32 i) {
  if constexpr (sizeof(E) == 4)
    return ptx::real(words.word[i]);
  else
    return widen(E{(u16)(words.word[i / 2] >> i % 2 * 16)});
}
template <class E, i32 count>
FN Words4 pack_elements(const float* x) {
  Words4 words = {};
#pragma unroll
  for (i32 i = 0; i < count; ++i) {
    if constexpr (sizeof(E) == 4)
      words.word[i] = ptx::bits(x[i]);
    else if (i % 2 == 0)
      words.word[i / 2] = pack(E{}, x[i], x[i + 1]);
  }
  return words;
}

}  // namespace arch
