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

struct WarpgroupProduct {
  Format format;
  u32 columns;
  bool add, may_add, a_in_registers, a_by_rows, b_by_rows;
};

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

// ---- sm_90a

u32 block_count();
void arrive_some(u32 barrier, u32 threads);

void mbarrier_init(u32 barrier, u32 count);
void fence_mbarrier_init();
void mbarrier_arrive(u32 barrier);
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes);
void mbarrier_wait_parity(u32 barrier, u32 parity);
void fence_proxy_async();
void set_registers(const char* name, u32 count);

__attribute__((const)) u32 cluster_rank();
void sync_cluster();
u32 far_address(u32 address, u32 rank);
void mbarrier_arrive_far(u32 far_barrier);
void mbarrier_wait_parity_far(u32 barrier, u32 parity);
void bulk_copy_far(u32 far_to, u32 from, u32 bytes, u32 far_barrier);

void wait_global(const u32* number, u32 value);
void add_release_global(u32* number, u32 x);

void prefetch_tensormap(const void* map);
void tma_load(u32 to, const void* map, u32 barrier, i32 x, i32 y, i32 z, i32 w);
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier);
void tma_store(const void* map, u32 from, i32 x, i32 y, i32 z, i32 w);
void tma_stores_commit();
void tma_stores_wait(u32 pending);

// Here registers do not travel by value: they stay the product's until it is waited for. `a_in_shared` is for products
// whose left side is not in registers.
void multiply_async(WarpgroupProduct product, float* d, const u32* a, u64 a_in_shared, u64 b);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 pending);

}  // namespace emulator
