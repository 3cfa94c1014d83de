// What the engine does for the functions of ptx.h. Operands travel by value, in registers: the kernel's own variables
// then never escape, and the checks of plain memory accesses (engine/plain.h) have only real memory to look at.
//
// A `name` is what messages call the operation; the lanes of a warp must all come with the same.
#pragma once
#include "base/types.h"

namespace emulator {

struct Floats4 {
  float at[4];
};

enum class Format { bf16, f16, f16_k8 };

// A thread has one of each for its whole life.
__attribute__((const)) u32 thread_index();
__attribute__((const)) u32 block_index();

void sync_block();
void sync_warp();
void sync_some(u32 barrier, u32 threads);

// `x` of another lane; a bit for each lane's `x`.
u32 exchange(const char* name, u32 x, u32 lane);
u32 ballot(const char* name, bool x);

u32 shared_address(const void* at);
Words4 load_shared(u32 from, u32 size);
void store_shared(u32 to, Words4 x, u32 size);
Words4 load_matrices(const char* name, u32 row, bool transposed);

void copy_async(u32 to, const void* from, u32 size, u32 valid);
void copies_commit();
void copies_wait(u32 pending);

Words4 load_global(const void* from, u32 size);
void store_global(void* to, Words4 x, u32 size);
void add_global(float* to, Floats4 x, u32 count);

float exp2(float x);
float log2(float x);
u16 bf16_of(float x);
u16 f16_of(float x);
float float_of_f16(u16 x);

Floats4 multiply_add(const char* name, Format format, Floats4 c, Words4 a, Words2 b);

}  // namespace emulator
