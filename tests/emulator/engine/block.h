// The threads of the block that runs, and the one place where it fails.
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

constexpr u32 lanes = 32, most_threads = 1024, most_warps = most_threads / lanes;

struct Region {
  uint64_t begin, end;
  const char* name;
  int64_t writable;
};

// What tests/emulator/__init__.py gives; laid out there too.
struct Launch {
  void (*kernel)(const void* params, void* memory);
  const void* params;
  int64_t params_bytes, blocks, threads, shared_bytes;
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
  u32 index;
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
  u32 passing;           // a bit for each warp that arrived and did not wait
  vector<u32> arrivals;  // what those bring: see Race::View
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

// All there is: one block runs at a time.
struct Block {
  const Launch* launch;
  u32 index;
  u32 thread_count, warp_count, running;
  Thread threads[most_threads];
  Warp warps[most_warps];
  Barrier barriers[16];
  Thread* current;
  Fiber scheduler;  // where a block began and ends
  Random random;
  u32 patience;  // of meetings after which another warp may take over, one in so many; 0: none
  char *stacks, *stacks_end;
  bool failed;
  alignas(64) char params[4096];  // the most that a kernel may have
};

inline Block block;

inline u32 warp_of(u32 thread) { return thread / lanes; }
inline Warp& own_warp() { return block.warps[warp_of(block.current->index)]; }

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

inline _Unwind_Reason_Code note_call(_Unwind_Context* context, void* noted) {
  auto& count = *static_cast<int64_t*>(noted);
  const uint64_t at = _Unwind_GetIP(context);
  Dl_info image;
  if (at == 0 || count == block.launch->call_count || !dladdr(reinterpret_cast<void*>(at), &image))
    return _URC_END_OF_STACK;
  block.launch->calls[count++] = at - reinterpret_cast<uint64_t>(image.dli_fbase);
  return _URC_NO_REASON;
}

inline void set_message(string const& said) {
  snprintf(block.launch->message, (size_t)block.launch->message_bytes, "%s", said.c_str());
  block.failed = true;
}

// Ends the launch. The threads' stacks are left as they are: nothing in a kernel needs to be destroyed.
[[noreturn]] inline void fail(string const& said) {
  set_message(text("block %u, ", block.index) + said);
  int64_t count = 0;
  _Unwind_Backtrace(note_call, &count);
  Fiber::go(block.current->fiber, block.scheduler);
  __builtin_unreachable();
}
[[noreturn]] inline void fail_here(string const& said) { fail(text("thread %u: ", block.current->index) + said); }

}  // namespace engine
