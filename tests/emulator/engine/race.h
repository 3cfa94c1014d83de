// Races on shared memory: accesses to the same bytes, not both reads, that nothing orders.
//
// Threads have vector clocks (Lamport 1978; Mattern 1989). A warp's count goes up wherever one of its threads tells
// others how far it came, and an access is noted with the count that its thread has then. A thread's view says, of
// every other thread, up to which count all accesses come before its present ones. Lanes of one warp are ordered by
// sync_warp and barriers only: the other meetings of a warp order no memory accesses.
//
// What copy engine and tensor cores do is no thread's access. It is noted with an event instead, which views count
// too: the phases of an mbarrier, a warpgroup's groups of products, a thread's groups of stores. Which phase of an
// mbarrier bytes come in is known when they are there.
//
// Threads read and write in their own block only. Copies from other blocks come there as well.
#pragma once
#include <memory>
#include "block.h"

namespace engine {

struct Race {
  static constexpr u32 unit = 2;           // bytes that are looked at together: the smallest access
  static constexpr u32 most_events = 128;  // of a block
  static constexpr u32 under_way = ~0u;    // the count of what has not come to its end
  using View = vector<u32>;                // [thread or event]

  bool on;
  u32 count[most_warps], events;
  vector<std::shared_ptr<const View>> views;  // [thread]
  enum class Kind : unsigned short { none, thread, copy_async, tma_load, bulk_copy_far };
  struct Write {
    u32 count;
    unsigned short by;  // thread or event
    Kind kind;          // copy_async: its thread has not waited for it
    bool operator==(Write const& other) const { return memcmp(this, &other, sizeof other) == 0; }
  };
  struct Reads {
    u32 count, who;  // the latest; of a warp the lanes, else the event
  };
  // For reads: one for each warp of a block, one for each warpgroup's products, one for stores, and one for copies to
  // each block of the cluster.
  u32 slots;
  vector<Write> writes;
  vector<Reads> reads;         // [unit][slot]
  View far_uses[most_blocks];  // of a block's shared memory by other blocks' threads and copies: the last counts

  void start(bool wanted) {
    on = wanted;
    events = 0;
    std::fill(count, count + most_warps, 1u);
    if (!on) return;
    const u32 units = cluster.size * cluster.part_bytes / unit;
    views.assign(cluster.thread_count, std::make_shared<const View>(view_size()));
    slots = slot_of_copies(cluster.size);
    writes.assign(units, Write{});
    reads.assign(units * slots, Reads{});
    for (u32 i = 0; i < cluster.size; ++i) far_uses[i].assign(view_size(), 0u);
  }
  static u32 view_size() { return cluster.thread_count + cluster.size * most_events; }
  static u32 slot_of_warpgroup(u32 in_block) { return cluster.block_warps + in_block; }
  static u32 slot_of_stores() { return slot_of_warpgroup(cluster.block_warps / 4); }
  static u32 slot_of_copies(u32 to_rank) { return slot_of_stores() + 1 + to_rank; }

  // ---- order

  // The warps come together, and learn of those that went by.
  void order(const bool (&met)[most_warps], View& went_by) {
    if (!on) return;
    const auto all = std::make_shared<View>(view_size());
    join(*all, went_by);
    went_by.clear();
    const View* last = nullptr;
    for (u32 i = 0; i < cluster.thread_count; ++i) {
      if (!met[warp_of(i)]) continue;
      if (views[i].get() != last) join(*all, *(last = views[i].get()));
      (*all)[i] = count[warp_of(i)];
    }
    for (u32 i = 0; i < cluster.thread_count; ++i)
      if (met[warp_of(i)]) views[i] = all;
    for (u32 warp = 0; warp < cluster.warp_count; ++warp) count[warp] += met[warp];
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
    auto& view = views[cluster.current->index];
    const auto mine = std::make_shared<View>(*view);
    join(*mine, from);
    (*mine)[event] = std::max((*mine)[event], its_count);
    view = mine;
  }
  u32 new_event() {
    const u32 most = cluster.size * most_events;
    if (events == most) fail_here(text("more than %u mbarriers, warpgroups and storing threads", most));
    return cluster.thread_count + events++;
  }

  // ---- accesses of the current thread

  void read(u32 from, u32 size, const char* name) {
    if (!on) return;
    const u32 me = cluster.current->index, warp = warp_of(me), slot = warp_of(cluster.current->in_block);
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) {
      after_write(*views[me], me, i, name, "reads");
      Reads& noted = reads[i * slots + slot];
      if (noted.count != count[warp]) noted = {count[warp], 0};
      noted.who |= 1u << me % lanes;
    }
  }
  void write(u32 to, u32 size, const char* name, bool pending = false) {
    if (!on) return;
    const u32 me = cluster.current->index;
    write(to, size, name, {count[warp_of(me)], (unsigned short)me, pending ? Kind::copy_async : Kind::thread});
  }
  // The copy is there, since its thread waited for it.
  void arrive(u32 to, u32 size) {
    if (!on) return;
    const u32 me = cluster.current->index;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i)
      writes[i].count = count[warp_of(me)], writes[i].kind = Kind::thread;
  }

  // ---- accesses that the current thread has made by others, and that are over with a count of an event

  void write_until(u32 event, Kind kind, u32 to, u32 size, const char* name) {
    if (on) write(to, size, name, {under_way, (unsigned short)event, kind});
  }
  void written_with(u32 its_count, u32 to, u32 size) {
    if (!on) return;
    for (u32 i = to / unit; i < (to + size) / unit; ++i) writes[i].count = its_count;
  }
  void read_until(u32 event, u32 its_count, u32 slot, u32 from, u32 size) {
    if (!on) return;
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) reads[i * slots + slot] = {its_count, event};
  }
  // ---- other blocks' shared memory, which is there until all their threads have ended

  // By a thread, which has just told how far it came, or until an event's count.
  void use_far(u32 rank, u32 thread) {
    if (on) use_far_until(rank, thread, count[warp_of(thread)] - 1);
  }
  void use_far_until(u32 rank, u32 who, u32 its_count) {
    if (on) far_uses[rank][who] = its_count;
  }
  // Its last thread ends: whether it is known that all of this is over.
  void check_end(u32 rank) const {
    if (!on) return;
    View known(view_size());
    const u32 first = rank * cluster.block_threads;
    for (u32 i = first; i < first + cluster.block_threads; ++i) join(known, *views[i]);
    for (u32 who = 0; who < known.size(); ++who) {
      if (far_uses[rank][who] <= known[who]) continue;
      const string use = who < cluster.thread_count ? thread_name(who) + " arrives at an mbarrier of it"
                                                    : "a bulk_copy_far reads its shared memory";
      fail("race: it ends, and " + use + ", with no sync_cluster between");
    }
  }

  // Whether what is there may be read by the current thread.
  void check_read(u32 from, u32 size, const char* name) const {
    if (!on) return;
    const u32 me = cluster.current->index;
    for (u32 i = from / unit; i <= (from + size - 1) / unit; ++i) after_write(*views[me], me, i, name, "reads");
  }
  // The same for all lanes of its warp, and many places of 16 bytes.
  void check_reads_of_warp(vector<u32> const& from, const char* name) const {
    if (!on) return;
    const View common = view_of_warp(warp_of(cluster.current->index));
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
    const u32 me = cluster.current->index, first_reader = rank_at(to) * cluster.block_threads;
    for (u32 i = to / unit; i <= (to + size - 1) / unit; ++i) {
      after_write(*views[me], me, i, name, "writes");
      for (u32 slot = 0; slot < slots; ++slot)
        if (const Reads& last = reads[i * slots + slot]; last.who) after_reads(last, slot, first_reader, i, name);
      writes[i] = noted;
    }
  }
  void after_write(const View& view, u32 me, u32 i, const char* name, const char* does) const {
    const Write& last = writes[i];
    if (last.kind == Kind::none) return;
    const auto fail_after = [&](string const& what) {
      fail_here(text("race: %s %s ", name, does) + byte_at(i * unit) + ", which " + what);
    };
    if (last.kind == Kind::copy_async) fail_after("a copy_async of " + thread_name(last.by) + " is bringing");
    if (last.by == me || last.count <= view[last.by]) return;
    if (last.kind == Kind::thread) fail_after(thread_name(last.by) + " wrote, with no barrier between");
    const char* copy = last.kind == Kind::tma_load ? "tma_load" : "bulk_copy_far";
    fail_after(text("a %s brings, with no wait for it between", copy));
  }
  void after_reads(const Reads& last, u32 slot, u32 first_reader, u32 i, const char* name) const {
    const u32 me = cluster.current->index;
    const View& view = *views[me];
    const auto fail_after = [&](string const& what) {
      fail_here(text("race: %s writes ", name) + byte_at(i * unit) + ", which " + what);
    };
    if (slot >= cluster.block_warps) {
      const char* reader = slot < slot_of_stores() ? "wgmma" : slot == slot_of_stores() ? "tma_store" : "bulk_copy_far";
      if (last.count > view[last.who]) fail_after(text("a %s reads, with no wait for it between", reader));
      return;
    }
    for (u32 left = last.who; left; left &= left - 1) {
      const u32 thread = first_reader + slot * lanes + (u32)__builtin_ctz(left);
      if (thread != me && last.count > view[thread]) fail_after(thread_name(thread) + " read, with no barrier between");
    }
  }
};

inline Race race;

}  // namespace engine
