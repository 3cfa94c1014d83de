// A launch: the clusters of blocks one after the other, in a random order.
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
  Stacks() : bytes(cluster.thread_count * stack_bytes) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    cluster.stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    cluster.stacks_end = cluster.stacks + bytes;
    for (u32 i = 0; i < cluster.thread_count; ++i) mprotect(cluster.stacks + i * stack_bytes, guard_bytes, PROT_NONE);
  }
  ~Stacks() { munmap(cluster.stacks, bytes); }

 private:
  size_t bytes;
};

inline void run_thread() {
  cluster.launch->kernel(cluster.params, shared.begin + shared.own_part());
  stop(*cluster.current, Thread::ended);
  if (--own_block().running == 0) {
    finish_mbarriers_and_transfers(cluster.current->rank);
    finish_warpgroups(cluster.current->rank);
    if (--cluster.running == 0) {
      finish_stores();
      Fiber::go(cluster.current->fiber, cluster.scheduler);
    }
  }
  leave();
}

inline void run_cluster(u32 index) {
  static constexpr u32 patiences[] = {0, 2, 16, 256};
  cluster.first = index * cluster.size;
  cluster.running = cluster.size;
  cluster.patience = patiences[cluster.random.below(4)];
  shared.start((u32)cluster.launch->shared_bytes);
  race.start(cluster.launch->race_check != 0);
  traffic.start();
  start_mbarriers_and_transfers();
  start_warpgroups();
  for (u32 i = 0; i < cluster.size; ++i) cluster.blocks[i] = {cluster.block_threads, {}};
  cluster.everyone = {};
  for (u32 i = 0; i < cluster.warp_count; ++i) {
    Warp& warp = cluster.warps[i];
    warp.ready = ~0u;
    warp.arrived = 0;
    std::iota(warp.order, warp.order + lanes, 0u);
    cluster.random.shuffle(warp.order, lanes);
    for (u32 place = 0; place < lanes; ++place) warp.place[warp.order[place]] = place;
  }
  for (u32 i = 0; i < cluster.thread_count; ++i) {
    Thread& thread = cluster.threads[i];
    thread.index = i;
    thread.rank = i / cluster.block_threads;
    thread.in_block = i % cluster.block_threads;
    thread.state = Thread::runs;
    thread.groups.clear();
    thread.open.clear();
    thread.fiber.start(cluster.stacks + i * stack_bytes, stack_bytes, run_thread);
  }
  const u32 first = cluster.random.below(cluster.warp_count);
  cluster.current = &cluster.threads[first * lanes + cluster.warps[first].order[0]];
  Fiber::go(cluster.scheduler, cluster.current->fiber);
}

// ---- faults of the processor: reported like any other, not the end of the tests

inline sigjmp_buf after_signal;

inline void on_signal(int number, siginfo_t* info, void*) {
  set_message(text("block %u, thread %u: %s at address %p", block_number(cluster.current->rank),
                   cluster.current->in_block, strsignal(number), info->si_addr));
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
  cluster.launch = &launch;
  cluster.failed = false;
  cluster.size = (u32)launch.cluster;
  cluster.block_threads = (u32)launch.threads;
  cluster.block_warps = cluster.block_threads / lanes;
  cluster.thread_count = cluster.size * cluster.block_threads;
  cluster.warp_count = cluster.size * cluster.block_warps;
  cluster.random.state = launch.seed;
  memcpy(cluster.params, launch.params, (size_t)launch.params_bytes);
  const Stacks stacks;
  vector<u32> order((size_t)(launch.blocks / launch.cluster));
  std::iota(order.begin(), order.end(), 0u);
  cluster.random.shuffle(order.data(), (u32)order.size());
  const CaughtSignals caught;
  if (sigsetjmp(after_signal, 1)) return;
  for (u32 index : order) {
    run_cluster(index);
    if (cluster.failed) return;
  }
}

}  // namespace engine
