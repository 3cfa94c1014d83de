// A launch: the blocks one after the other, in a random order.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <numeric>
#include "memory.h"
#include "order.h"
#include "tma.h"
#include "wgmma.h"

namespace engine {

constexpr size_t stack_bytes = 512 << 10, guard_bytes = 64 << 10;  // nothing may touch a guard

// Every kernel's library has an engine of its own, so memory is given back when a launch ends.
class Stacks {
 public:
  Stacks() : bytes(block.thread_count * stack_bytes) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    block.stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    block.stacks_end = block.stacks + bytes;
    for (u32 i = 0; i < block.thread_count; ++i) mprotect(block.stacks + i * stack_bytes, guard_bytes, PROT_NONE);
  }
  ~Stacks() { munmap(block.stacks, bytes); }

 private:
  size_t bytes;
};

inline void run_thread() {
  block.launch->kernel(block.params, shared.begin);
  stop(*block.current, Thread::ended);
  if (--block.running == 0) {
    finish_mbarriers_and_transfers();
    finish_warpgroups();
    Fiber::go(block.current->fiber, block.scheduler);
  }
  leave();
}

inline void run_block(u32 index) {
  static constexpr u32 patiences[] = {0, 2, 16, 256};
  block.index = index;
  block.running = block.thread_count;
  block.patience = patiences[block.random.below(4)];
  shared.start((u32)block.launch->shared_bytes);
  race.start(block.launch->race_check != 0, shared.bytes);
  traffic.start(shared.bytes);
  start_mbarriers_and_transfers();
  start_warpgroups();
  for (Barrier& barrier : block.barriers) barrier = {};
  for (u32 i = 0; i < block.warp_count; ++i) {
    Warp& warp = block.warps[i];
    warp.ready = ~0u;
    warp.arrived = 0;
    std::iota(warp.order, warp.order + lanes, 0u);
    block.random.shuffle(warp.order, lanes);
    for (u32 place = 0; place < lanes; ++place) warp.place[warp.order[place]] = place;
  }
  for (u32 i = 0; i < block.thread_count; ++i) {
    Thread& thread = block.threads[i];
    thread.index = i;
    thread.state = Thread::runs;
    thread.groups.clear();
    thread.open.clear();
    thread.fiber.start(block.stacks + i * stack_bytes, stack_bytes, run_thread);
  }
  const u32 first = block.random.below(block.warp_count);
  block.current = &block.threads[first * lanes + block.warps[first].order[0]];
  Fiber::go(block.scheduler, block.current->fiber);
}

// ---- faults of the processor: reported like any other, not the end of the tests

inline sigjmp_buf after_signal;

inline void on_signal(int number, siginfo_t* info, void*) {
  set_message(text("block %u, thread %u: %s at address %p", block.index, block.current->index, strsignal(number),
                   info->si_addr));
  siglongjmp(after_signal, 1);
}

class CaughtSignals {
 public:
  CaughtSignals() {
    stack_t mine = {};
    mine.ss_sp = stack;
    mine.ss_size = sizeof stack;
    sigaltstack(&mine, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < count; ++i) sigaction(numbers[i], &action, &before[i]);
  }
  ~CaughtSignals() {
    for (int i = 0; i < count; ++i) sigaction(numbers[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
  }

 private:
  static constexpr int count = 4, numbers[count] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  inline static char stack[64 << 10];
  stack_t stack_before;
  struct sigaction before[count];
};

inline void run(const Launch& launch) {
  block.launch = &launch;
  block.failed = false;
  block.thread_count = (u32)launch.threads;
  block.warp_count = block.thread_count / lanes;
  block.random.state = launch.seed;
  memcpy(block.params, launch.params, (size_t)launch.params_bytes);
  const Stacks stacks;
  vector<u32> order((size_t)launch.blocks);
  std::iota(order.begin(), order.end(), 0u);
  block.random.shuffle(order.data(), (u32)order.size());
  const CaughtSignals caught;
  if (sigsetjmp(after_signal, 1)) return;
  for (u32 index : order) {
    run_block(index);
    if (block.failed) return;
  }
}

}  // namespace engine
