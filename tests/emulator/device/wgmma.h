// The functions of kernel_src/arch/sm90/wgmma.h, which says what each does, on the emulator; wgmma itself for any
// shape.
#pragma once
#include "ptx.h"

namespace emulator {

template <class E>
constexpr Format format_of = Format::bf16;
template <>
constexpr Format format_of<f16> = Format::f16;

template <i32 sums>
constexpr u32 columns_of() {
  static_assert(sums % 4 == 0 && sums <= 128, "a product has a multiple of 8 columns, at most 256");
  return 2 * sums;
}

}  // namespace emulator

namespace ptx {

template <bool add, bool b_by_rows, bool a_by_rows = false, class E, i32 sums>
FN void wgmma(E, float (&d)[sums], u64 a, u64 b, bool now = add) {
  emulator::multiply_async(
      {emulator::format_of<E>, emulator::columns_of<sums>(), now, add, false, a_by_rows, b_by_rows}, d, nullptr, a, b);
}
template <bool add, bool b_by_rows, class E, i32 sums>
FN void wgmma(E, float (&d)[sums], const u32 (&a)[4], u64 b, bool now = add) {
  emulator::multiply_async({emulator::format_of<E>, emulator::columns_of<sums>(), now, add, true, false, b_by_rows}, d,
                           a, 0, b);
}

FN void wgmma_fence() { emulator::wgmma_fence(); }
FN void wgmma_commit() { emulator::wgmma_commit(); }
template <i32 pending>
FN void wgmma_wait() {
  emulator::wgmma_wait(pending);
}
FN void compute_before(float) {}
// The engine has filled them behind the compiler's back already.
template <i32 n>
FN void registers_change(float (&)[n]) {}

FN u64 swizzled(u32 address, u32 chunk_bytes = 16) {
  constexpr u64 group_bytes = 1024, swizzle_128 = 1;
  return (u64)((address & 0x3ffff) >> 4) | (u64)(chunk_bytes >> 4) << 16 | (group_bytes >> 4) << 32 | swizzle_128 << 62;
}

}  // namespace ptx
