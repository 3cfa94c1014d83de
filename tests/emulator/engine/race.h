// Races on shared memory: accesses to the same bytes, not both reads, that nothing orders.
//
// Threads have vector clocks (Lamport 1978; Mattern 1989). A warp's count goes up wherever one of its threads tells
// others how far it came, and an access is noted with the count that its thread has then. A thread's view says, of
// every other thread, up to which count all accesses come before its present ones. Lanes of one warp are ordered by
// sync_warp and barriers only: the other meetings of a warp order no memory accesses.
//
// What copy engine and tensor cores do is no thread's access. It is noted with an event instead, which views count
// too: the phases of an mbarrier, a warpgroup's groups of products, a thread's groups of stores.
#pragma once
#include <memory>
#include "block.h"

namespace engine {

struct Race {
  static constexpr u32 unit = 2;  // bytes that are looked at together: the smallest access
  static constexpr u32 most_events = 128;
  using View = vector<u32>;  // [thread or event]

  bool on;
  u32 count[most_warps], events;
  vector<std::shared_ptr<const View>> views;  // [thread]
  struct Write {
    u32 count;
    unsigned short by;  // thread or event
    bool any, pending;  // pending: a copy that its thread has not waited for
    bool operator==(Write const& other) const { return memcmp(this, &other, sizeof other) == 0; }
  };
  struct Reads {
    u32 count, who;  // the latest; of a warp the lanes, else the event
  };
  u32 slots;  // for reads: one for each warp, one for each warpgroup's products, and one for stores
  vector<Write> writes;
  vector<Reads> reads;  // [unit][slot]

  void start(bool wanted, u32 bytes) {
    on = wanted;
    events = 0;
    std::fill(count, count + most_warps, 1u);
    if (!on) return;
    views.assign(block.thread_count, std::make_shared<const View>(block.thread_count + most_events));
    slots = block.warp_count + block.warp_count / 4 + 1;
    writes.assign(bytes / unit + 1, Write{});
    reads.assign((bytes / unit + 1) * slots, Reads{});
  }
  u32 slot_of_warpgroup(u32 warpgroup) const { return block.warp_count + warpgroup; }
  u32 slot_of_stores() const { return slots - 1; }

  // ---- order

  // The warps come together, and learn of those that went by.
  void order(const bool (&met)[most_warps], View& went_by) {
    if (!on) return;
    const auto all = std::make_shared<View>(block.thread_count + most_events);
    join(*all, went_by);
    went_by.clear();
    const View* last = nullptr;
    for (u32 i = 0; i < block.thread_count; ++i) {
      if (!met[warp_of(i)]) continue;
      if (views[i].get() != last) join(*all, *(last = views[i].get()));
      (*all)[i] = count[warp_of(i)];
    }
    for (u32 i = 0; i < block.thread_count; ++i)
      if (met[warp_of(i)]) views[i] = all;
    for (u32 warp = 0; warp < block.warp_count; ++warp) count[warp] += met[warp];
  }
  void order_warp(u32 warp) {
    bool met[most_warps] = {};
    met[warp] = true;
    View nobody;
    order(met, nobody);
  }
  // A thread tells how far it came.
  void release(u32 thread, View& to) {
    if (!on) return;
    to.resize(views[thread]->size());
    join(to, *views[thread]);
    to[thread] = count[warp_of(thread)]++;
  }
  // The current thread learns of it, and of an event's count.
  void acquire(const View& from, u32 event, u32 its_count) {
    if (!on) return;
    auto& view = views[block.current->index];
    const auto mine = std::make_shared<View>(*view);
    join(*mine, from);
    (*mine)[event] = std::max((*mine)[event], its_count);
    view = mine;
  }
  u32 new_event() {
    if (events == most_events) fail_here(text("more than %u mbarriers, warpgroups and storing threads", most_events));
    return block.thread_count + events++;
  }

  // ---- accesses of the current thread

  void read(u32 from, u32 size, const char* name) {
    if (!on) return;
    const u32 me = block.current->index, warp = warp_of(me);
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) {
      after_write(*views[me], me, i, name, "reads");
      Reads& noted = reads[i * slots + warp];
      if (noted.count != count[warp]) noted = {count[warp], 0};
      noted.who |= 1u << me % lanes;
    }
  }
  void write(u32 to, u32 size, const char* name, bool pending = false) {
    if (!on) return;
    const u32 me = block.current->index;
    write(to, size, name, {count[warp_of(me)], (unsigned short)me, true, pending});
  }
  // The copy is there, since its thread waited for it.
  void arrive(u32 to, u32 size) {
    if (!on) return;
    const u32 me = block.current->index;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i)
      writes[i].count = count[warp_of(me)], writes[i].pending = false;
  }

  // ---- accesses that the current thread has made by others, and that are over with a count of an event

  void write_until(u32 event, u32 its_count, u32 to, u32 size, const char* name) {
    if (on) write(to, size, name, {its_count, (unsigned short)event, true, false});
  }
  void read_until(u32 event, u32 its_count, u32 slot, u32 from, u32 size) {
    if (!on) return;
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) reads[i * slots + slot] = {its_count, event};
  }
  // Whether what is there may be read by the current thread.
  void check_read(u32 from, u32 size, const char* name) const {
    if (!on) return;
    const u32 me = block.current->index;
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) after_write(*views[me], me, i, name, "reads");
  }
  // The same for all lanes of its warp, and many places of 16 bytes.
  void check_reads_of_warp(vector<u32> const& from, const char* name) const {
    if (!on) return;
    const View common = view_of_warp(warp_of(block.current->index));
    Write last = {};
    for (u32 at : from)
      for (u32 i = at / unit; i < (at + 16) / unit; ++i) {
        if (writes[i] == last) continue;
        after_write(common, nobody, i, name, "reads");
        last = writes[i];
      }
  }

 private:
  static constexpr u32 nobody = ~0u;

  static void join(View& to, const View& from) {
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
  }
  // What comes before the accesses of all of its lanes.
  View view_of_warp(u32 warp) const {
    View common(views[0]->size(), ~0u);
    for (u32 thread = warp * lanes; thread < (warp + 1) * lanes; ++thread) {
      const View& view = *views[thread];
      const u32 of_others = common[thread];
      for (size_t i = 0; i < view.size(); ++i) common[i] = std::min(common[i], view[i]);
      common[thread] = of_others;
    }
    return common;
  }
  void write(u32 to, u32 size, const char* name, Write noted) {
    const u32 me = block.current->index;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i) {
      after_write(*views[me], me, i, name, "writes");
      for (u32 slot = 0; slot < slots; ++slot)
        if (const Reads& last = reads[i * slots + slot]; last.who) after_reads(last, slot, i, name);
      writes[i] = noted;
    }
  }
  void after_write(const View& view, u32 me, u32 i, const char* name, const char* does) const {
    const Write& last = writes[i];
    if (!last.any) return;
    if (last.pending)
      fail_here(text("race: %s %s shared byte %u, which a copy_async of thread %u is bringing", name, does, i * unit,
                     last.by));
    if (last.by == me || last.count <= view[last.by]) return;
    if (last.by >= block.thread_count)
      fail_here(text("race: %s %s shared byte %u, which a tma_load brings, with no wait for it between", name, does,
                     i * unit));
    fail_here(text("race: %s %s shared byte %u, which thread %u wrote, with no barrier between", name, does, i * unit,
                   last.by));
  }
  void after_reads(const Reads& last, u32 slot, u32 i, const char* name) const {
    const u32 me = block.current->index;
    const View& view = *views[me];
    if (slot >= block.warp_count) {
      if (last.count > view[last.who])
        fail_here(text("race: %s writes shared byte %u, which a %s reads, with no wait for it between", name, i * unit,
                       slot == slot_of_stores() ? "tma_store" : "wgmma"));
      return;
    }
    for (u32 left = last.who; left; left &= left - 1) {
      const u32 thread = slot * lanes + (u32)__builtin_ctz(left);
      if (thread != me && last.count > view[thread])
        fail_here(text("race: %s writes shared byte %u, which thread %u read, with no barrier between", name, i * unit,
                       thread));
    }
  }
};

inline Race race;

}  // namespace engine
