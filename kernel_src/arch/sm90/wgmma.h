// Matrix products of a warpgroup, four warps from a multiple of four on (PTX: wgmma). The functions for the shapes that
// a kernel uses are generated (jitattn/wgmma.py):
//
//   template <bool add, bool b_by_rows, bool a_by_rows = false>
//   void wgmma(E, float (&d)[n / 2], u64 a, u64 b, bool now = add);
//   template <bool add, bool b_by_rows>
//   void wgmma(E, float (&d)[n / 2], const u32 (&a)[4], u64 b, bool now = add);
//
// d (64 x n, float32) += a (64 x 16) b (16 x n), for E bf16 or f16; d = a b without `add`, or where that is known when
// the kernel runs, without `now`. With g = lane / 4 and t = lane % 4, warp w of the
// group has rows 16 w + g (d[4 j], d[4 j + 1]) and 16 w + g + 8 (d[4 j + 2], d[4 j + 3]) of columns 8 j + 2 t and
// 8 j + 2 t + 1. The words of `a` are those of its 16 rows in ptx.h's mma; in shared memory `a` and `b` are given by
// `swizzled`. What is contracted lies along the rows of shared memory, or across them where x_by_rows.
#pragma once
#include "ptx.h"
#include "wgmma_shapes.h"

namespace ptx {

// Between what threads did to registers and products that use them.
FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products since the last commit are a group; wgmma_wait returns when at most `pending` groups are under way. Until
// then nothing may touch their registers.
FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <i32 pending>
FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Compilers put a wait as early as they can, and what could have been done meanwhile behind it. What makes `x`, which
// is never negative, stays before a wait that follows.
FN void compute_before(float x) {
  asm volatile("{.reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never nanosleep.u32 0;}" ::"f"(x));
}
// The compiler takes registers of a product as ready where the product is issued: what uses them stays behind this.
template <i32 n>
FN void registers_change(float (&d)[n]) {
#pragma unroll
  for (i32 i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// An operand in shared memory as tma.h lays it out: groups of 8 rows of 128 bytes, one group after the other.
// `chunk_bytes`: where b has more than 64 columns by rows, the distance of the boxes that hold 64 columns each.
FN u64 swizzled(u32 address, u32 chunk_bytes = 16) {
  constexpr u64 group_bytes = 1024, swizzle_128 = 1;
  return (u64)((address & 0x3ffff) >> 4) | (u64)(chunk_bytes >> 4) << 16 | (group_bytes >> 4) << 32 | swizzle_128 << 62;
}

}  // namespace ptx
