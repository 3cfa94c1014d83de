// Numbers in global memory by which blocks of threads wait for each other. As in ptx.h, one small function for each
// instruction.
#pragma once
#include "ptx.h"

namespace ptx {

// Until others have made it `value`; what they did before is seen then.
FN void wait_global(const u32* number, u32 value) {
  u32 now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(number) : "memory");
  while (now != value);
}
// Tells others what this thread, and those that it has waited for, did before.
FN void add_release_global(u32* number, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(number), "r"(x) : "memory");
}

}  // namespace ptx
