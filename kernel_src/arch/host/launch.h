// How threads share a launch: each takes the next block from a common counter until none is left.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

#if !defined(_WIN32)
extern "C" int sched_yield();
#endif

namespace arch {

// What a launch is given: laid out by jitattn/runtime/host.py.
template <class Params>
struct Job {
  i64 next, done, blocks;
  i64 workers;  // that have come so far; each takes its own part of the memory
  i64 worker_bytes;
  char* memory;
  Params params;
};

// One turn of a wait for other threads' last blocks. Their time is short, so the core is given away only after a while.
FN void relax(i32 turn) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
#if !defined(_WIN32)
  if (turn > 1000) sched_yield();
#endif
}

template <class Kernel, class Params>
FN void work(Job<Params>& job) {
  const i64 worker = __atomic_fetch_add(&job.workers, 1, __ATOMIC_RELAXED);
  // A worker that comes after the last block has been taken may find the memory gone; it does not look at it.
  auto* memory = reinterpret_cast<typename Kernel::Memory*>(job.memory + worker * job.worker_bytes);
  for (i64 block; (block = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED)) < job.blocks;) {
    Kernel::run(block, *memory, job.params);
    __atomic_fetch_add(&job.done, 1, __ATOMIC_RELEASE);
  }
}

template <class Params>
FN void wait(Job<Params>& job) {
  for (i32 turn = 0; __atomic_load_n(&job.done, __ATOMIC_ACQUIRE) < job.blocks; turn += turn < 2000) relax(turn);
}

}  // namespace arch

// The exported functions of a kernel.
#define JITATTN_ENTRY(Algorithm, Params)                                                         \
  KERNEL i64 jitattn_worker_bytes(const Params* p) {                                             \
    return (i64)sizeof(Algorithm::Memory) + Algorithm::worker_bytes(*p);                         \
  }                                                                                              \
  KERNEL i64 jitattn_workspace_bytes(const Params* p) { return Algorithm::workspace_bytes(*p); } \
  KERNEL void jitattn_work(arch::Job<Params>* job) { arch::work<Algorithm>(*job); }              \
  KERNEL void jitattn_wait(arch::Job<Params>* job) { arch::wait(*job); }
