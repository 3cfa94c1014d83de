// The functions of device/emulator.h, and the one that a launch calls.
#include "block.h"
#include "launch.h"
#include "memory.h"
#include "order.h"
#include "plain.h"
#include "products.h"
#include "tma.h"
#include "turns.h"
#include "wgmma.h"

extern "C" __attribute__((visibility("default"))) int emulator_run(const engine::Launch* launch) {
  engine::run(*launch);
  return engine::cluster.failed;
}

namespace emulator {

using engine::check_global;
using engine::cluster;
using engine::Exchange;
using engine::fail_here;
using engine::lanes;
using engine::meet;
using engine::race;
using engine::shared;
using engine::text;

u32 thread_index() { return cluster.current->in_block; }
u32 block_index() { return engine::block_number(cluster.current->rank); }

void sync_block() { engine::wait_at(engine::whole_block, cluster.block_threads); }
void sync_warp() {
  const u32 warp = engine::warp_of(cluster.current->index);
  meet("sync_warp", {}, [&](auto&, auto&) { race.order_warp(warp); });
}
static void check_barrier(const char* name, u32 barrier, u32 threads) {
  if (barrier == 0 || barrier > 15) fail_here(text("%s(%u): barriers 1 to 15 are to be had", name, barrier));
  if (threads == 0 || threads % lanes || threads > cluster.block_threads)
    fail_here(text("%s for %u of %u threads: whole warps meet", name, threads, cluster.block_threads));
}
void sync_some(u32 barrier, u32 threads) {
  check_barrier("sync_some", barrier, threads);
  engine::wait_at(barrier, threads);
}

u32 exchange(const char* name, u32 x, u32 lane) {
  if (lane >= lanes) fail_here(text("%s with lane %u of a warp of %u", name, lane, lanes));
  return meet(name, {{x, lane}},
              [](const Exchange(&in)[lanes], Words4(&out)[lanes]) {
                for (u32 i = 0; i < lanes; ++i) out[i].word[0] = in[in[i].word[1]].word[0];
              })
      .word[0];
}
u32 ballot(const char* name, bool x) {
  return meet(name, {{x}},
              [](const Exchange(&in)[lanes], Words4(&out)[lanes]) {
                u32 votes = 0;
                for (u32 i = 0; i < lanes; ++i) votes |= in[i].word[0] << i;
                for (u32 i = 0; i < lanes; ++i) out[i].word[0] = votes;
              })
      .word[0];
}

u32 shared_address(const void* at) {
  const auto offset = static_cast<const char*>(at) - shared.begin - shared.own_part();
  if (offset < 0 || offset > shared.bytes) fail_here("shared_address of something that is not in shared memory");
  return (u32)offset + engine::shared_start;
}
Words4 load_shared(u32 from, u32 size) {
  const u32 offset = shared.check("load_shared", from, size);
  race.read(offset, size, "load_shared");
  Words4 x = {};
  memcpy(&x, shared.begin + offset, size);
  return x;
}
void store_shared(u32 to, Words4 x, u32 size) {
  const u32 offset = shared.check("store_shared", to, size);
  engine::note_write(offset, size, "store_shared");
  memcpy(shared.begin + offset, &x, size);
}
Words4 load_matrices(const char* name, u32 row, bool transposed) {
  const u32 offset = shared.check(name, row, 16);
  race.read(offset, 16, name);
  return meet(name, {{offset}}, [&](const Exchange(&in)[lanes], Words4(&out)[lanes]) {
    for (u32 matrix = 0; matrix < 4; ++matrix) {
      u16 x[8][8];
      for (u32 i = 0; i < 8; ++i) memcpy(x[i], shared.begin + in[8 * matrix + i].word[0], 16);
      for (u32 lane = 0; lane < lanes; ++lane) {
        const u32 i = lane / 4, j = lane % 4 * 2;
        out[lane].word[matrix] = transposed ? x[j][i] | (u32)x[j + 1][i] << 16 : x[i][j] | (u32)x[i][j + 1] << 16;
      }
    }
  });
}

void copy_async(u32 to, const void* from, u32 size, u32 valid) {
  engine::begin_copy(to, static_cast<const char*>(from), size, valid);
}
void copies_commit() { engine::close_group(); }
void copies_wait(u32 pending) { engine::finish_groups(pending); }

Words4 load_global(const void* from, u32 size) {
  check_global("load_global", from, size, false);
  Words4 x = {};
  memcpy(&x, from, size);
  return x;
}
void store_global(void* to, Words4 x, u32 size) {
  check_global("store_global", to, size, true);
  memcpy(to, &x, size);
}
void add_global(float* to, Floats4 x, u32 count) {
  check_global("add_global", to, 4 * count, true);
  for (u32 i = 0; i < count; ++i) to[i] += x.at[i];
}

// The approximations of a GPU take and give no subnormal numbers.
float exp2(float x) { return engine::flushed(exp2f(engine::flushed(x))); }
float log2(float x) { return log2f(engine::flushed(x)); }
u16 bf16_of(float x) { return engine::bf16_of(x); }
u16 f16_of(float x) { return engine::f16_of(x); }
float float_of_f16(u16 x) { return engine::float_of_f16(x); }

Floats4 multiply_add(const char* name, Format format, Floats4 c, Words4 a, Words2 b) {
  Exchange in;
  memcpy(in.word, &c, 16);
  memcpy(in.word + 4, &a, 16);
  memcpy(in.word + 8, &b, 8);
  const Words4 out = meet(name, in, [&](const Exchange(&ins)[lanes], Words4(&outs)[lanes]) {
    switch (format) {
      case Format::bf16:
        return engine::multiply_add<Format::bf16>(ins, outs);
      case Format::f16:
        return engine::multiply_add<Format::f16>(ins, outs);
      case Format::f16_k8:
        return engine::multiply_add<Format::f16_k8>(ins, outs);
    }
  });
  memcpy(&c, &out, 16);
  return c;
}

// ---- sm_90a

u32 block_count() { return (u32)cluster.launch->blocks; }
void arrive_some(u32 barrier, u32 threads) {
  check_barrier("arrive_some", barrier, threads);
  meet("arrive_some", {{barrier, threads}},
       [](const Exchange(&in)[lanes], Words4(&)[lanes]) { engine::pass_by(in[0].word[0], in[0].word[1]); });
}

void mbarrier_init(u32 barrier, u32 count) { engine::init_mbarrier(barrier, count); }
void fence_mbarrier_init() { engine::fence_mbarriers(); }
void mbarrier_arrive(u32 barrier) { engine::arrive_at_own("mbarrier_arrive", barrier, 0); }
void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  engine::arrive_at_own("mbarrier_arrive_expect_tx", barrier, bytes);
}
void mbarrier_wait_parity(u32 barrier, u32 parity) {
  engine::wait_for_parity("mbarrier_wait_parity", barrier, parity, false);
}
void fence_proxy_async() {
  engine::traffic.fence();
  engine::fence_mbarriers();
}
void set_registers(const char* name, u32 count) {
  meet(name, {}, [&](auto&, auto&) { engine::set_registers(name, count); });
}

u32 cluster_rank() { return cluster.current->rank; }
void sync_cluster() { engine::wait_at(engine::whole_cluster, cluster.thread_count); }
u32 far_address(u32 address, u32 rank) {
  if (address >> engine::far_shift) fail_here(text("far_address of %#x, a far address already", address));
  if (rank >= cluster.size) fail_here(text("far_address in block %u of a cluster of %u", rank, cluster.size));
  return address | (rank + 1) << engine::far_shift;
}
void mbarrier_arrive_far(u32 far_barrier) {
  engine::arrive_at("mbarrier_arrive_far", shared.check_far("mbarrier_arrive_far", far_barrier, 8), 0);
}
void mbarrier_wait_parity_far(u32 barrier, u32 parity) {
  engine::wait_for_parity("mbarrier_wait_parity_far", barrier, parity, true);
}
void bulk_copy_far(u32 far_to, u32 from, u32 bytes, u32 far_barrier) {
  engine::begin_copy_far(far_to, from, bytes, far_barrier);
}

void wait_global(const u32* number, u32 value) { engine::wait_for_global(number, value); }
void add_release_global(u32* number, u32 x) { engine::add_to_global(number, x); }

void prefetch_tensormap(const void* map) { engine::TensorMap::of("prefetch_tensormap", map); }
void tma_load(u32 to, const void* map, u32 barrier, i32 x, i32 y, i32 z, i32 w) {
  engine::begin_load_of_box(to, map, barrier, {x, y, z, w});
}
void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  engine::begin_load_of_bytes(to, static_cast<const char*>(from), bytes, barrier);
}
void tma_store(const void* map, u32 from, i32 x, i32 y, i32 z, i32 w) { engine::begin_store(map, from, {x, y, z, w}); }
void tma_stores_commit() { engine::commit_stores(); }
void tma_stores_wait(u32 pending) { engine::wait_for_stores(pending); }

void multiply_async(WarpgroupProduct product, float* d, const u32* a, u64 a_in_shared, u64 b) {
  if (product.add && !product.may_add) fail_here("wgmma adds now, but may not `add`");
  Exchange in = {};
  memcpy(in.word, &d, 8);
  if (product.a_in_registers)
    memcpy(in.word + 2, a, 16);
  else
    memcpy(in.word + 2, &a_in_shared, 8);
  memcpy(in.word + 6, &b, 8);
  in.word[8] = product.columns << 8 | (u32)product.format << 4 | product.add << 3 | product.a_in_registers << 2 |
               product.a_by_rows << 1 | product.b_by_rows;
  memcpy(in.word + 10, &a, 8);
  meet("wgmma", in, [&](const Exchange(&ins)[lanes], auto&) { engine::issue(product, ins); });
}
void wgmma_fence() {
  meet("wgmma_fence", {}, [](auto&, auto&) { engine::fence_products(); });
}
void wgmma_commit() {
  meet("wgmma_commit", {}, [](auto&, auto&) { engine::commit_products(); });
}
void wgmma_wait(u32 pending) {
  meet("wgmma_wait", {{pending}}, [&](auto&, auto&) {
    engine::own_warpgroup("wgmma_wait").take(engine::warp_in_group(), {"wgmma_wait", {pending}});
  });
  engine::wait_for_products(pending);
}

}  // namespace emulator
