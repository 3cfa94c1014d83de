// Operands out of shared memory for GPUs without matrix loads, in the layout of ptx.h's: lanes hand their rows'
// addresses round.
#pragma once
#include "ptx.h"

namespace arch {

FN void load_matrices(u32 (&to)[4], u32 row) {
  const i32 lane = (i32)ptx::thread_index() % 32;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) to[i] = ptx::load_shared<u32>(ptx::shuffle(row, 8 * i + lane / 4) + lane % 4 * 4);
}
FN void load_matrices_transposed(u32 (&to)[4], u32 row) {
  const i32 lane = (i32)ptx::thread_index() % 32, first = lane % 4 * 2;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const u32 low = ptx::shuffle(row, 8 * i + first), high = ptx::shuffle(row, 8 * i + first + 1);
    to[i] = (u32)ptx::load_shared<u16>(low + lane / 4 * 2) | (u32)ptx::load_shared<u16>(high + lane / 4 * 2) << 16;
  }
}

}  // namespace arch
