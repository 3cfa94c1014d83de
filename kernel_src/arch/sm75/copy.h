// Copies from global to shared memory for GPUs on which they pass through registers: they are done when `fetch`
// returns.
#pragma once
#include "ptx.h"

namespace arch {

template <i32 size>
FN void fetch(u32 to, const void* from, u32 valid) {
  Words4 x = {};
  if (valid == size)
    x = ptx::load_global<size>(from);
  else
#pragma unroll
    for (u32 i = 0; i < size; i += 2)
      if (i < valid) x.word[i / 4] |= ptx::load_global<2>((const char*)from + i).word[0] << i % 4 * 8;
  if constexpr (size == 16)
    ptx::store_shared(to, x);
  else if constexpr (size == 8)
    ptx::store_shared(to, Words2{x.word[0], x.word[1]});
  else
    ptx::store_shared(to, x.word[0]);
}
FN void fetches_commit() {}
template <i32 pending>
FN void fetches_wait() {}

}  // namespace arch
