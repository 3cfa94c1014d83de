// The threads of the blocks that run, a cluster of them, and the one place where they fail.
#pragma once
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <unwind.h>
#include <string>
#include <vector>
#include "emulator.h"
#include "fiber.h"

namespace engine {

using emulator::Floats4;
using std::string;
using std::vector;

constexpr u32 lanes = 32, most_blocks = 8;  // of a warp, of a cluster
constexpr u32 most_threads = most_blocks * 1024, most_warps = most_threads / lanes;

struct Region {
  uint64_t begin, end;
  const char* name;
  int64_t writable;
};

// What tests/emulator/__init__.py gives; laid out there too.
struct Launch {
  void (*kernel)(const void* params, void* memory);
  const void* params;
  int64_t params_bytes, blocks, cluster, threads, shared_bytes;
  const Region* regions;
  int64_t region_count;
  uint64_t seed;
  int64_t race_check;
  char* message;  // of an error; then where in the library the calls stand that led there, innermost first
  int64_t message_bytes;
  uint64_t* calls;
  int64_t call_count;
};

// A copy that has been asked for and not been made.
struct Copy {
  u32 to, size, valid;
  const char* from;
};

// Something that threads sleep until.
struct Event {
  virtual string waiting() const = 0;  // what a thread does that sleeps, for messages
};

struct Thread {
  enum State { runs, meets, waits, sleeps, ended };
  Fiber fiber;
  u32 index;           // in the cluster
  u32 rank, in_block;  // of its block in the cluster; its index there
  State state;
  const char* operation;  // that it meets its warp in
  u32 barrier;            // that it waits at
  const Event* awaited;   // that it sleeps until
  vector<vector<Copy>> groups;
  vector<Copy> open;  // copies that are in no group yet
};

struct Exchange {
  u32 word[12];
};

struct Warp {
  u32 ready;    // a bit for each place in `order`: whether the thread there can go on
  u32 arrived;  // a bit for each lane that waits in `operation`
  const char* operation;
  u32 order[lanes];  // which lane runs at each place
  u32 place[lanes];  // and the other way round
  Exchange in[lanes];
  Words4 out[lanes];
};

struct Barrier {
  u32 threads, arrived;
  u32 passing;           // a bit for each warp of a block that arrived and did not wait
  vector<u32> arrivals;  // what those bring: see Race::View
};

struct Block {
  u32 running;  // threads that have not ended
  Barrier barriers[16];
};

struct Random {
  uint64_t state;
  u32 next() {  // splitmix64
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (u32)(x >> 32);
  }
  u32 below(u32 end) { return (u32)((uint64_t)next() * end >> 32); }
  template <class T>
  void shuffle(T* x, u32 count) {
    for (u32 i = count; i > 1; --i) std::swap(x[i - 1], x[below(i)]);
  }
};

// All there is: one cluster runs at a time. What is said of one block only is said of each.
struct Cluster {
  const Launch* launch;
  u32 first;                       // of its blocks
  u32 size, running;               // how many they are, and of how many threads run
  u32 block_threads, block_warps;  // of one block
  u32 thread_count, warp_count;    // of all, one block's after the other's
  u32 part_bytes;                  // from one block's shared memory to the next one's
  Block blocks[most_blocks];
  Thread threads[most_threads];
  Warp warps[most_warps];
  Barrier everyone;  // sync_cluster's
  Thread* current;
  Fiber scheduler;  // where a cluster began and ends
  Random random;
  u32 patience;  // of meetings after which another warp may take over, one in so many; 0: none
  char *stacks, *stacks_end;
  bool failed;
  alignas(64) char params[4096];  // the most that a kernel may have
};

inline Cluster cluster;

inline u32 warp_of(u32 thread) { return thread / lanes; }
inline u32 block_number(u32 rank) { return cluster.first + rank; }
inline Block& own_block() { return cluster.blocks[cluster.current->rank]; }
// Which block's shared memory an offset lies in.
inline u32 rank_at(u32 offset) { return offset / cluster.part_bytes; }
inline Warp& own_warp() { return cluster.warps[warp_of(cluster.current->index)]; }

inline string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

// "3", "0-31, 40"
inline string list(vector<u32> const& numbers) {
  string said;
  for (size_t i = 0; i < numbers.size(); ++i) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    said += (said.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (last > i) said += "-" + std::to_string(numbers[last]);
    i = last;
  }
  return said;
}

// Where and who, in messages: what is said of no block is in the current thread's.
inline string of_block(u32 rank) {
  return rank == cluster.current->rank ? "" : text(" of block %u", block_number(rank));
}
inline string byte_at(u32 offset) {
  return text("shared byte %u", offset % cluster.part_bytes) + of_block(rank_at(offset));
}
inline string thread_name(u32 thread) {
  return text("thread %u", cluster.threads[thread].in_block) + of_block(cluster.threads[thread].rank);
}

inline _Unwind_Reason_Code note_call(_Unwind_Context* context, void* noted) {
  auto& count = *static_cast<int64_t*>(noted);
  const uint64_t at = _Unwind_GetIP(context);
  Dl_info image;
  if (at == 0 || count == cluster.launch->call_count || !dladdr(reinterpret_cast<void*>(at), &image))
    return _URC_END_OF_STACK;
  cluster.launch->calls[count++] = at - reinterpret_cast<uint64_t>(image.dli_fbase);
  return _URC_NO_REASON;
}

inline void set_message(string const& said) {
  snprintf(cluster.launch->message, (size_t)cluster.launch->message_bytes, "%s", said.c_str());
  cluster.failed = true;
}

// Ends the launch. The threads' stacks are left as they are: nothing in a kernel needs to be destroyed.
[[noreturn]] inline void fail(string const& said) {
  set_message(text("block %u, ", block_number(cluster.current->rank)) + said);
  int64_t count = 0;
  _Unwind_Backtrace(note_call, &count);
  Fiber::go(cluster.current->fiber, cluster.scheduler);
  __builtin_unreachable();
}
[[noreturn]] inline void fail_here(string const& said) { fail(text("thread %u: ", cluster.current->in_block) + said); }

}  // namespace engine
