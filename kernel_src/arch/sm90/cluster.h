// Blocks of threads that run at the same time and reach each other's shared memory (PTX: clusters). As in ptx.h, one
// small function for each instruction. "Far" addresses are those of the whole cluster (`far_address`); all others are
// of the block's own shared memory.
#pragma once
#include "ptx.h"

namespace ptx {

// Of this block in its cluster.
FN u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster meet; what they did to shared memory is seen afterwards.
FN void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Where the block of that rank has what this block has at a shared address.
FN u32 far_address(u32 address, u32 rank) {
  u32 far;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(address), "r"(rank));
  return far;
}

// Arrives at an mbarrier of any block.
FN void mbarrier_arrive_far(u32 far_barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(far_barrier) : "memory");
}
// As mbarrier_wait_parity, where other blocks arrive.
FN void mbarrier_wait_parity_far(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The copy engine copies own shared memory to any block's, a multiple of 16 bytes like both addresses; the bytes arrive
// at an mbarrier of that block.
FN void bulk_copy_far(u32 far_to, u32 from, u32 bytes, u32 far_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(far_to),
      "r"(from), "r"(bytes), "r"(far_barrier)
      : "memory");
}

}  // namespace ptx
