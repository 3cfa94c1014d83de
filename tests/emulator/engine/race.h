// Races on shared memory: accesses to the same bytes, not both reads, that no barrier orders.
//
// Warps have vector clocks (Lamport 1978; Mattern 1989): a warp's own count goes up at each barrier it passes, and
// `seen` says up to which count of every warp all accesses come before its present ones. Lanes of one warp are ordered
// by sync_warp and barriers only: the other meetings of a warp order no memory accesses.
#pragma once
#include "block.h"

namespace engine {

struct Race {
  static constexpr u32 unit = 2;  // bytes that are looked at together: the smallest access

  bool on;
  u32 count[most_warps], seen[most_warps][most_warps];
  struct Write {
    u32 count;
    unsigned short thread;
    bool any, pending;  // pending: a copy that its thread has not waited for
  };
  struct Reads {
    u32 count, lanes;  // the latest, and of these the lanes
  };
  vector<Write> writes;
  vector<Reads> reads;  // [unit][warp]

  void start(bool wanted, u32 bytes) {
    on = wanted;
    for (u32 warp = 0; warp < most_warps; ++warp) {
      count[warp] = 1;
      for (u32& other : seen[warp]) other = 0;
    }
    if (!on) return;
    writes.assign(bytes / unit + 1, Write{});
    reads.assign((bytes / unit + 1) * block.warp_count, Reads{});
  }

  // The warps pass a barrier together.
  void order(const bool (&met)[most_warps]) {
    u32 all[most_warps] = {};
    for (u32 warp = 0; warp < block.warp_count; ++warp) {
      if (!met[warp]) continue;
      for (u32 i = 0; i < block.warp_count; ++i) all[i] = std::max(all[i], seen[warp][i]);
      all[warp] = std::max(all[warp], count[warp]);
    }
    for (u32 warp = 0; warp < block.warp_count; ++warp) {
      if (!met[warp]) continue;
      memcpy(seen[warp], all, sizeof all);
      ++count[warp];
    }
  }
  void order_warp(u32 warp) { seen[warp][warp] = count[warp]++; }

  void read(u32 from, u32 size, const char* name) {
    if (!on) return;
    const u32 me = block.current->index, warp = warp_of(me);
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) {
      after_write(i, name, "reads");
      Reads& noted = reads[i * block.warp_count + warp];
      if (noted.count != count[warp]) noted = {count[warp], 0};
      noted.lanes |= 1u << me % lanes;
    }
  }
  void write(u32 to, u32 size, const char* name, bool pending = false) {
    if (!on) return;
    const u32 me = block.current->index;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i) {
      after_write(i, name, "writes");
      for (u32 warp = 0; warp < block.warp_count; ++warp) after_reads(i, warp, name);
      writes[i] = {count[warp_of(me)], (unsigned short)me, true, pending};
    }
  }
  // The copy is there, since its thread waited for it.
  void arrive(u32 to, u32 size) {
    if (!on) return;
    const u32 me = block.current->index;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i)
      writes[i].count = count[warp_of(me)], writes[i].pending = false;
  }

 private:
  bool ordered(u32 warp, u32 its_count) const {
    const u32 mine = warp_of(block.current->index);
    return its_count <= seen[mine][warp];
  }
  void after_write(u32 i, const char* name, const char* does) {
    const Write& last = writes[i];
    if (!last.any) return;
    const u32 me = block.current->index;
    if (last.pending)
      fail_here(text("race: %s %s shared byte %u, which a copy_async of thread %u is bringing", name, does, i * unit,
                     last.thread));
    if (last.thread != me && !ordered(warp_of(last.thread), last.count))
      fail_here(text("race: %s %s shared byte %u, which thread %u wrote, with no barrier between", name, does, i * unit,
                     last.thread));
  }
  void after_reads(u32 i, u32 warp, const char* name) {
    const Reads& last = reads[i * block.warp_count + warp];
    const u32 me = block.current->index;
    u32 others = last.lanes;
    if (warp == warp_of(me)) others &= ~(1u << me % lanes);
    if (others && !ordered(warp, last.count))
      fail_here(text("race: %s writes shared byte %u, which thread %u read, with no barrier between", name, i * unit,
                     warp * lanes + (u32)__builtin_ctz(others)));
  }
};

inline Race race;

}  // namespace engine
