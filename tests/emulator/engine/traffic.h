// What copy engine and tensor cores, which PTX calls the async proxy, are doing in shared memory, and what threads
// wrote that those might not see yet.
#pragma once
#include "block.h"

namespace engine {

struct Traffic {
  static constexpr u32 unit = 16;  // bytes that are looked at together
  static constexpr u32 piece = 2;  // and those of which it is known who wrote them
  struct Unit {
    unsigned short loads, products, stores;  // that are under way
  };
  struct Written {
    unsigned short by;
    u32 fence;  // the number of that thread's next one; 0: no thread wrote
  };
  vector<Unit> units;
  vector<Written> pieces;
  u32 fences[most_threads];  // that threads have passed

  void start(u32 bytes) {
    units.assign(bytes / unit + 1, Unit{});
    pieces.assign((bytes / unit + 1) * (unit / piece), Written{});
    std::fill(fences, fences + most_threads, 0u);
  }
  // fence_proxy_async.
  void fence() { ++fences[block.current->index]; }

  // The current thread writes.
  void write(u32 to, u32 size, const char* name) {
    const u32 me = block.current->index, last = to + size - 1;
    for (u32 i = to / unit; i <= last / unit; ++i) check_idle(i, name);
    for (u32 i = to / piece; i <= last / piece; ++i) pieces[i] = {(unsigned short)me, fences[me] + 1};
  }
  // What the async proxy may begin to do with 16 bytes.
  Unit& begin_read(u32 from, const char* name) {
    check_fenced(from, name, "reads");
    Unit& x = units[from / unit];
    if (x.loads) fail_here(text("%s reads shared byte %u, which a tma_load is bringing", name, from));
    return x;
  }
  Unit& begin_write(u32 to, const char* name) {
    check_idle(to / unit, name);
    check_fenced(to, name, "writes");
    for (u32 i = to / piece; i < (to + unit) / piece; ++i) pieces[i].fence = 0;
    return units[to / unit];
  }

 private:
  void check_idle(u32 i, const char* name) const {
    const Unit& x = units[i];
    if (!x.loads && !x.products && !x.stores) return;
    const char* what = x.products ? "wgmma reads" : x.stores ? "tma_store reads" : "tma_load brings";
    fail_here(text("%s writes shared byte %u, which a %s, and nobody has waited for it", name, i * unit, what));
  }
  void check_fenced(u32 at, const char* name, const char* does) const {
    for (u32 i = at / piece; i < (at + unit) / piece; ++i)
      if (const Written& x = pieces[i]; x.fence && x.fence == fences[x.by] + 1)
        fail_here(text("%s %s shared byte %u, which thread %u wrote without a fence_proxy_async", name, does, i * piece,
                       x.by));
  }
};

inline Traffic traffic;

}  // namespace engine
