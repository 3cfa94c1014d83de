// The functions of kernel_src/arch/sm90/turns.h, which says what each does, on the emulator.
#pragma once
#include "ptx.h"

namespace ptx {

FN void wait_global(const u32* number, u32 value) { emulator::wait_global(number, value); }
FN void add_release_global(u32* number, u32 x) { emulator::add_release_global(number, x); }

}  // namespace ptx
