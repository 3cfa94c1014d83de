// The functions of kernel_src/arch/sm90/cluster.h, which says what each does, on the emulator.
#pragma once
#include "ptx.h"

namespace ptx {

FN u32 cluster_rank() { return emulator::cluster_rank(); }
FN void sync_cluster() { emulator::sync_cluster(); }
FN u32 far_address(u32 address, u32 rank) { return emulator::far_address(address, rank); }
FN void mbarrier_arrive_far(u32 far_barrier) { emulator::mbarrier_arrive_far(far_barrier); }
FN void mbarrier_wait_parity_far(u32 barrier, u32 parity) { emulator::mbarrier_wait_parity_far(barrier, parity); }
FN void bulk_copy_far(u32 far_to, u32 from, u32 bytes, u32 far_barrier) {
  emulator::bulk_copy_far(far_to, from, bytes, far_barrier);
}

}  // namespace ptx
