// What copy engine and tensor cores, which PTX calls the async proxy, are doing in shared memory, and what threads
// wrote that those might not see yet.
#pragma once
#include "block.h"

namespace engine {

struct Traffic {
  static constexpr u32 unit = 16;           // bytes that are looked at together
  static constexpr u32 piece = 2;           // and those of which it is known who wrote them
  struct Unit {                             // what is under way
    unsigned short products, stores, sent;  // that read; `sent`: copies to any block
    bool loaded, received;
    bool written() const { return loaded || received; }
  };
  struct Written {
    unsigned short by;
    u32 fence;  // the number of that thread's next one; 0: no thread wrote
  };
  vector<Unit> units;
  vector<Written> pieces;
  u32 fences[most_threads];  // that threads have passed

  void start() {
    const u32 bytes = cluster.size * cluster.part_bytes;
    units.assign(bytes / unit, Unit{});
    pieces.assign(bytes / piece, Written{});
    std::fill(fences, fences + most_threads, 0u);
  }
  // fence_proxy_async.
  void fence() { ++fences[cluster.current->index]; }

  // The current thread writes.
  void write(u32 to, u32 size, const char* name) {
    const u32 me = cluster.current->index, last = to + size - 1;
    for (u32 i = to / unit; i <= last / unit; ++i) check_idle(i, name);
    for (u32 i = to / piece; i <= last / piece; ++i) pieces[i] = {(unsigned short)me, fences[me] + 1};
  }
  // What the async proxy may begin to do with 16 bytes.
  Unit& begin_read(u32 from, const char* name) {
    check_fenced(from, name, "reads");
    Unit& x = units[from / unit];
    if (x.written()) fail_here(text("%s reads ", name) + byte_at(from) + text(", which a %s is bringing", bringing(x)));
    return x;
  }
  Unit& begin_write(u32 to, const char* name) {
    check_idle(to / unit, name);
    check_fenced(to, name, "writes");
    for (u32 i = to / piece; i < (to + unit) / piece; ++i) pieces[i].fence = 0;
    return units[to / unit];
  }
  void end_write(u32 to, u32 size) {
    for (u32 i = to / unit; i < (to + size) / unit; ++i) units[i].loaded = units[i].received = false;
  }
  void end_send(u32 from, u32 size) {
    for (u32 i = from / unit; i < (from + size) / unit; ++i) --units[i].sent;
  }

 private:
  void check_idle(u32 i, const char* name) const {
    const Unit& x = units[i];
    if (!x.written() && !x.products && !x.stores && !x.sent) return;
    const char* what = x.products ? "wgmma" : x.stores ? "tma_store" : x.sent ? "bulk_copy_far" : bringing(x);
    fail_here(text("%s writes ", name) + byte_at(i * unit) +
              text(", which a %s %s, and nobody has waited for it", what, x.written() ? "brings" : "reads"));
  }
  static const char* bringing(Unit const& x) { return x.loaded ? "tma_load" : "bulk_copy_far"; }
  void check_fenced(u32 at, const char* name, const char* does) const {
    for (u32 i = at / piece; i < (at + unit) / piece; ++i)
      if (const Written& x = pieces[i]; x.fence && x.fence == fences[x.by] + 1)
        fail_here(text("%s %s ", name, does) + byte_at(i * piece) + ", which " + thread_name(x.by) +
                  " wrote without a fence_proxy_async");
  }
};

inline Traffic traffic;

}  // namespace engine
