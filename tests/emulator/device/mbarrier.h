// The functions of kernel_src/arch/sm90/mbarrier.h, which says what each does, on the emulator.
#pragma once
#include "ptx.h"

namespace ptx {

FN u32 block_count() { return emulator::block_count(); }

FN void mbarrier_init(u32 barrier, u32 count) { emulator::mbarrier_init(barrier, count); }
FN void fence_mbarrier_init() { emulator::fence_mbarrier_init(); }
FN void mbarrier_arrive(u32 barrier) { emulator::mbarrier_arrive(barrier); }
FN void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { emulator::mbarrier_arrive_expect_tx(barrier, bytes); }
FN void mbarrier_wait_parity(u32 barrier, u32 parity) { emulator::mbarrier_wait_parity(barrier, parity); }

FN void arrive_some(u32 barrier, u32 threads) { emulator::arrive_some(barrier, threads); }
FN void fence_proxy_async() { emulator::fence_proxy_async(); }

FN u32 here_and_now(u32 x) { return x; }

template <i32 registers>
FN void setmaxnreg_inc() {
  emulator::set_registers("setmaxnreg_inc", registers);
}
template <i32 registers>
FN void setmaxnreg_dec() {
  emulator::set_registers("setmaxnreg_dec", registers);
}

}  // namespace ptx
