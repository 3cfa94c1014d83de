// Barriers in shared memory on which threads wait for copies and for each other (PTX: mbarrier), what else warps in
// different roles need, and the order between what threads and what copy engine and tensor cores do to shared memory.
// As in ptx.h, one small function for each instruction, and "shared" addresses are offsets in the shared window.
#pragma once
#include "ptx.h"

namespace ptx {

FN u32 block_count() { return gridDim.x; }

// A phase ends when `count` arrivals and all bytes that were announced have come; the next begins at once. Phases have
// parity 0, 1, 0, ... 8 bytes, aligned to 8.
FN void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// What was initialised is seen by the copy engine; other threads see it after a barrier of the block.
FN void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
FN void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces bytes that copies will bring before the phase ends.
FN void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of that parity is over: it returns at once where the phase under way has the other parity.
FN void mbarrier_wait_parity(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Counts as `threads` arrivals of a warp do at the barrier that sync_some waits at, without waiting.
FN void arrive_some(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What this thread wrote to shared memory is seen by copies and products that begin after a barrier.
FN void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// `x`, of which the compiler does not know that it is the same every time.
FN u32 here_and_now(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Registers of each thread of a warpgroup, all of whose warps call this: a multiple of 8.
template <i32 registers>
FN void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <i32 registers>
FN void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace ptx
