// The functions of kernel_src/arch/cuda/ptx.h, which says what each does, on the emulator.
#pragma once
#include "base/types.h"
#include "emulator.h"
#include "qualifiers.h"

namespace emulator {

FN void multiply_add_to(float (&c)[4], const char* name, Format format, Words4 a, Words2 b) {
  const Floats4 sum = multiply_add(name, format, {{c[0], c[1], c[2], c[3]}}, a, b);
  for (i32 i = 0; i < 4; ++i) c[i] = sum.at[i];
}

}  // namespace emulator

namespace ptx {

// ---- where a thread stands

FN u32 thread_index() { return emulator::thread_index(); }
FN u32 block_index() { return emulator::block_index(); }

// ---- order

FN void sync_block() { emulator::sync_block(); }
FN void sync_warp() { emulator::sync_warp(); }
FN void sync_some(u32 barrier, u32 threads) { emulator::sync_some(barrier, threads); }

// ---- arithmetic

FN float exp2(float x) { return emulator::exp2(x); }
FN float log2(float x) { return emulator::log2(x); }
FN u32 bits(float x) {
  u32 y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
FN float real(u32 x) {
  float y;
  __builtin_memcpy(&y, &x, 4);
  return y;
}
FN u32 pack_bf16(float low, float high) { return emulator::bf16_of(low) | (u32)emulator::bf16_of(high) << 16; }
FN u32 pack_f16(float low, float high) { return emulator::f16_of(low) | (u32)emulator::f16_of(high) << 16; }
FN float float_of_f16(u16 x) { return emulator::float_of_f16(x); }

// ---- between the lanes of a warp

FN float shuffle_xor(float x, i32 mask) {
  return real(emulator::exchange("shuffle_xor", bits(x), thread_index() % 32 ^ mask));
}
FN bool any(bool x) { return emulator::ballot("any", x) != 0; }
FN u32 shuffle(u32 x, i32 lane) { return emulator::exchange("shuffle", x, lane); }

// ---- shared memory

FN u32 shared_address(const void* at) { return emulator::shared_address(at); }

template <class T>
FN T load_shared(u32 from);
template <>
FN u16 load_shared<u16>(u32 from) {
  return (u16)emulator::load_shared(from, 2).word[0];
}
template <>
FN u32 load_shared<u32>(u32 from) {
  return emulator::load_shared(from, 4).word[0];
}
template <>
FN Words4 load_shared<Words4>(u32 from) {
  return emulator::load_shared(from, 16);
}
FN void store_shared(u32 to, u16 x) { emulator::store_shared(to, {{x}}, 2); }
FN void store_shared(u32 to, u32 x) { emulator::store_shared(to, {{x}}, 4); }
FN void store_shared(u32 to, Words2 x) { emulator::store_shared(to, {{x.word[0], x.word[1]}}, 8); }
FN void store_shared(u32 to, Words4 x) { emulator::store_shared(to, x, 16); }

FN void load_matrices(u32 (&to)[4], u32 row) {
  const Words4 x = emulator::load_matrices("load_matrices", row, false);
  for (i32 i = 0; i < 4; ++i) to[i] = x.word[i];
}
FN void load_matrices_transposed(u32 (&to)[4], u32 row) {
  const Words4 x = emulator::load_matrices("load_matrices_transposed", row, true);
  for (i32 i = 0; i < 4; ++i) to[i] = x.word[i];
}

// ---- copies from global to shared memory that go on in the background

template <i32 size>
FN void copy_async(u32 to, const void* from, u32 valid) {
  emulator::copy_async(to, from, size, valid);
}
FN void copies_commit() { emulator::copies_commit(); }
template <i32 pending>
FN void copies_wait() {
  emulator::copies_wait(pending);
}

// ---- global memory

template <i32 size>
FN Words4 load_global(const void* from) {
  return emulator::load_global(from, size);
}
template <i32 size>
FN void store_global(void* to, Words4 x) {
  emulator::store_global(to, x, size);
}
FN void add_global(float* to, float x) { emulator::add_global(to, {{x}}, 1); }
FN void add_global(float* to, float x, float y) { emulator::add_global(to, {{x, y}}, 2); }
FN void add_global(float* to, float x, float y, float z, float w) { emulator::add_global(to, {{x, y, z, w}}, 4); }

// ---- matrix products of a warp

FN void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::multiply_add_to(c, "mma_bf16", emulator::Format::bf16, {{a[0], a[1], a[2], a[3]}}, {{b[0], b[1]}});
}
FN void mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::multiply_add_to(c, "mma_f16", emulator::Format::f16, {{a[0], a[1], a[2], a[3]}}, {{b[0], b[1]}});
}
FN void mma_f16_k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  emulator::multiply_add_to(c, "mma_f16_k8", emulator::Format::f16_k8, {{a0, a1}}, {{b0}});
}

}  // namespace ptx
