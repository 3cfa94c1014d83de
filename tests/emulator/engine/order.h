// Who runs next, and where threads wait for one another.
#pragma once
#include <string.h>
#include <algorithm>
#include "block.h"
#include "race.h"

namespace engine {

constexpr u32 whole_block = 0, whole_cluster = ~0u;  // barriers; others are 1 to 15

inline string barrier_name(u32 number) {
  if (number == whole_block) return "sync_block";
  return number == whole_cluster ? "sync_cluster" : text("sync_some(%u)", number);
}

// Deadlock: what every thread is doing, in words.
inline string states() {
  vector<std::pair<string, vector<u32>>> groups;
  for (u32 i = 0; i < cluster.thread_count; ++i) {
    const Thread& t = cluster.threads[i];
    const string what = t.state == Thread::ended    ? "ended"
                        : t.state == Thread::meets  ? text("in %s", t.operation)
                        : t.state == Thread::waits  ? "at " + barrier_name(t.barrier)
                        : t.state == Thread::sleeps ? t.awaited->waiting()
                                                    : "running";
    const string of = of_block(t.rank), doing = of.empty() ? what : of.substr(1) + " " + what;
    auto same = std::find_if(groups.begin(), groups.end(), [&](auto& group) { return group.first == doing; });
    if (same == groups.end()) same = groups.insert(groups.end(), {doing, {}});
    same->second.push_back(t.in_block);
  }
  string said;
  for (auto& [doing, threads] : groups) said += (said.empty() ? "" : "; ") + list(threads) + " " + doing;
  return said;
}

// A warp with a thread that can go on, from a random one on; -1 if there is none.
inline int ready_warp() {
  const u32 first = cluster.random.below(cluster.warp_count);
  for (u32 i = 0; i < cluster.warp_count; ++i) {
    const u32 warp = (first + i) % cluster.warp_count;
    if (cluster.warps[warp].ready) return (int)warp;
  }
  return -1;
}

// Goes on with the next thread of a warp, in the warp's order, from a place on.
inline void run(u32 warp, u32 place) {
  const Warp& chosen = cluster.warps[warp];
  const u32 later = chosen.ready >> place << place;
  place = (u32)__builtin_ctz(later ? later : chosen.ready);
  Thread &left = *cluster.current, &next = cluster.threads[warp * lanes + chosen.order[place]];
  if (&next == &left) return;
  cluster.current = &next;
  Fiber::go(left.fiber, next.fiber);
}

// Makes one of the copies that are under way, if there are any (tma.h).
bool advance_a_transfer();

inline void run_any_warp() {
  int warp = ready_warp();
  while (warp < 0 && advance_a_transfer()) warp = ready_warp();
  if (warp < 0) fail("deadlock: threads " + states());
  run((u32)warp, 0);
}

// Leaves the current thread, which can not go on, for the next of its warp that can, or else for another warp.
inline void leave() {
  const u32 index = cluster.current->index, place = cluster.warps[warp_of(index)].place[index % lanes];
  if (cluster.warps[warp_of(index)].ready)
    run(warp_of(index), place);
  else
    run_any_warp();
}

inline void stop(Thread& thread, Thread::State why) {
  Warp& warp = cluster.warps[warp_of(thread.index)];
  thread.state = why;
  warp.ready &= ~(1u << warp.place[thread.index % lanes]);
}

inline void sleep_until(const Event& event) {
  cluster.current->awaited = &event;
  stop(*cluster.current, Thread::sleeps);
  leave();
}
inline void wake(const Event& event) {
  for (u32 i = 0; i < cluster.thread_count; ++i) {
    Thread& thread = cluster.threads[i];
    if (thread.state != Thread::sleeps || thread.awaited != &event) continue;
    Warp& warp = cluster.warps[warp_of(i)];
    thread.state = Thread::runs;
    warp.ready |= 1u << warp.place[i % lanes];
  }
}

// Gives another warp a turn now and then, so that warps drift apart as they do on a GPU.
inline void maybe_leave_warp() {
  if (cluster.patience && cluster.random.below(cluster.patience) == 0) run_any_warp();
}

// The lanes of a warp come together: each leaves `in`, the last to come lets complete(ins, outs) make what each gets.
template <class F>
inline Words4 meet(const char* operation, Exchange const& in, F complete) {
  Thread& thread = *cluster.current;
  Warp& warp = own_warp();
  const u32 lane = thread.index % lanes;
  if (warp.arrived && strcmp(warp.operation, operation) != 0) {
    vector<u32> others;
    for (u32 i = 0; i < lanes; ++i)
      if (warp.arrived >> i & 1) others.push_back(warp_of(thread.in_block) * lanes + i);
    fail_here(text("divergent warp: it comes to %s while threads ", operation) + list(others) + " wait in " +
              warp.operation);
  }
  warp.operation = thread.operation = operation;
  warp.in[lane] = in;
  warp.arrived |= 1u << lane;
  if (warp.arrived != ~0u) {
    stop(thread, Thread::meets);
    leave();
  } else {
    complete(warp.in, warp.out);
    warp.arrived = 0;
    warp.ready = ~0u;
    for (u32 i = 0; i < lanes; ++i) cluster.threads[warp_of(thread.index) * lanes + i].state = Thread::runs;
    maybe_leave_warp();
  }
  return warp.out[lane];
}

// ---- barriers 0 (of the whole block) to 15 of the current thread's block, and the cluster's

inline Barrier& barrier_for(u32 number, u32 threads) {
  Barrier& barrier = number == whole_cluster ? cluster.everyone : own_block().barriers[number];
  if (barrier.arrived && barrier.threads != threads)
    fail_here(text("sync_some(%u) for %u threads, while others wait there for %u", number, threads, barrier.threads));
  barrier.threads = threads;
  return barrier;
}

inline void complete_barrier(u32 number, Barrier& barrier) {
  const u32 first = number == whole_cluster ? 0 : cluster.current->rank * cluster.block_threads;
  const u32 end = number == whole_cluster ? cluster.thread_count : first + cluster.block_threads;
  bool met[most_warps] = {};
  for (u32 i = first; i < end; ++i) {
    Thread& other = cluster.threads[i];
    const bool here = other.state == Thread::waits && other.barrier == number;
    if (i % lanes == 0)
      met[warp_of(i)] = here;
    else if (here != met[warp_of(i)])
      fail_here(barrier_name(number) + text(" is complete, but with a part of warp %u only", warp_of(other.in_block)));
  }
  for (u32 i = first; i < end; ++i)
    if (met[warp_of(i)]) cluster.threads[i].state = Thread::runs;
  for (u32 warp = warp_of(first); warp < warp_of(end); ++warp)
    if (met[warp]) cluster.warps[warp].ready = ~0u;
  barrier.arrived = barrier.passing = 0;
  race.order(met, barrier.arrivals);
}

inline void wait_at(u32 number, u32 threads) {
  Thread& thread = *cluster.current;
  Barrier& barrier = barrier_for(number, threads);
  thread.barrier = number;
  stop(thread, Thread::waits);
  if (++barrier.arrived < threads) return leave();
  complete_barrier(number, barrier);
  run_any_warp();
}

// The current thread's whole warp arrives, and goes on.
inline void pass_by(u32 number, u32 threads) {
  Barrier& barrier = barrier_for(number, threads);
  const u32 warp = warp_of(cluster.current->index), in_block = warp_of(cluster.current->in_block);
  if (barrier.passing >> in_block & 1)
    fail_here(text("arrive_some(%u): warp %u has arrived already, and the barrier is not complete", number, in_block));
  if (barrier.arrived + lanes > threads)
    fail_here(text("arrive_some(%u): more than %u threads come to the barrier", number, threads));
  barrier.passing |= 1u << in_block;
  barrier.arrived += lanes;
  for (u32 i = 0; i < lanes; ++i) race.release(warp * lanes + i, barrier.arrivals);
  if (barrier.arrived == threads) complete_barrier(number, barrier);
}

}  // namespace engine
