// Every instruction that C++ has no words for, one small function each. Nothing else in the CUDA sources contains asm
// or a builtin, so that tests can run the same sources on a processor with these functions written in C++
// (tests/emulator).
//
// "Shared" addresses are 32-bit offsets in the shared window. What reads or writes shared memory behind the compiler's
// back is volatile, which keeps it in order with barriers; products are not, so that the compiler may interleave them.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

namespace ptx {

// ---- where a thread stands

FN u32 thread_index() { return threadIdx.x; }
FN u32 block_index() { return blockIdx.x; }

// ---- order

FN void sync_block() { __syncthreads(); }
FN void sync_warp() { __syncwarp(); }
// `threads` threads (whole warps) meet at one of the barriers 1 to 15.
FN void sync_some(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- between the lanes of a warp

FN float shuffle_xor(float x, i32 mask) { return __shfl_xor_sync(~0u, x, mask); }
FN bool any(bool x) { return __any_sync(~0u, x); }
FN u32 shuffle(u32 x, i32 lane) { return __shfl_sync(~0u, x, lane); }

// ---- shared memory

FN u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

template <class T>
FN T load_shared(u32 from);
template <>
FN u16 load_shared<u16>(u32 from) {
  u16 x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}
template <>
FN u32 load_shared<u32>(u32 from) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
template <>
FN Words4 load_shared<Words4>(u32 from) {
  Words4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(from)
               : "memory");
  return x;
}
FN void store_shared(u32 to, u16 x) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(x) : "memory"); }
FN void store_shared(u32 to, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
FN void store_shared(u32 to, Words2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(x.word[0]), "r"(x.word[1]) : "memory");
}
FN void store_shared(u32 to, Words4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]),
               "r"(x.word[3])
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned to
// 16) and receives, of every matrix, elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. sm_75 and newer.
FN void load_matrices(u32 (&to)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// The same of the transposed matrices: elements 2 (l % 4) and 2 (l % 4) + 1 of column l / 4.
FN void load_matrices_transposed(u32 (&to)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// ---- copies from global to shared memory that go on in the background; sm_80 and newer

// `size` bytes (4, 8 or 16, both addresses aligned to it), of which the first `valid` are read and the rest are zeros.
template <i32 size>
FN void copy_async(u32 to, const void* from, u32 valid) {
  if constexpr (size == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(size), "r"(valid)
                 : "memory");
}
// This thread's copies since the last call become a group.
FN void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of this thread's latest groups are under way.
template <i32 pending>
FN void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- global memory

// `size` bytes (2, 4, 8 or 16), aligned to their size, read once and through the read-only path.
template <i32 size>
FN Words4 load_global(const void* from) {
  Words4 x = {};
  if constexpr (size == 16)
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(from));
  else if constexpr (size == 8)
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(x.word[0]), "=r"(x.word[1]) : "l"(from));
  else if constexpr (size == 4)
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x.word[0]) : "l"(from));
  else {
    u16 half;
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(half) : "l"(from));
    x.word[0] = half;
  }
  return x;
}
// The first `size` bytes (2, 4, 8 or 16) of x.
template <i32 size>
FN void store_global(void* to, Words4 x) {
  if constexpr (size == 16)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]),
                 "r"(x.word[3])
                 : "memory");
  else if constexpr (size == 8)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x.word[0]), "r"(x.word[1]) : "memory");
  else if constexpr (size == 4)
    asm volatile("st.global.b32 [%0], %1;" ::"l"(to), "r"(x.word[0]) : "memory");
  else
    asm volatile("st.global.b16 [%0], %1;" ::"l"(to), "h"((u16)x.word[0]) : "memory");
}
// *to += x, in whatever order the threads come.
FN void add_global(float* to, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory"); }
// The same of two and four neighbours, aligned to their size; sm_90 and newer.
FN void add_global(float* to, float x, float y) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
FN void add_global(float* to, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- arithmetic

FN float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FN float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FN u32 bits(float x) { return __float_as_uint(x); }
FN float real(u32 x) { return __uint_as_float(x); }

// Two floats as 16-bit formats in one word, the first in the low half, rounded to nearest even.
FN u32 pack_bf16(float low, float high) {  // sm_80 and newer
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
FN u32 pack_f16(float low, float high) {
  u32 x;
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}"
      : "=r"(x)
      : "f"(low), "f"(high));
  return x;
}
FN float float_of_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// ---- matrix products of a warp: c (16 x 8, float32) += a b. With g = lane / 4 and t = lane % 4, c holds rows g (c[0],
// c[1]) and g + 8 (c[2], c[3]) of columns 2 t and 2 t + 1.

// a 16 x 16: words a[0] (row g) and a[1] (row g + 8) hold columns 2 t, 2 t + 1; a[2] and a[3] those 8 further.
// b 16 x 8: word b[0] holds rows 2 t, 2 t + 1 of column g, b[1] those 8 further. sm_80 and newer.
FN void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FN void mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// a 16 x 8 and b 8 x 8: the first two words of a and the first of b above. sm_75 and newer.
FN void mma_f16_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

}  // namespace ptx
