// mbarriers: 8 bytes of shared memory each. Their state is here; the bytes hold a mark, so that a write over them
// shows.
#pragma once
#include <map>
#include "memory.h"
#include "order.h"

namespace engine {

struct Mbarrier : Event {
  u32 offset, count, missing;  // arrivals of a phase; those that have not come in this one
  int bytes = 0;               // that are announced and have not come
  u32 phase = 0;               // how many are over
  u32 initialiser;
  bool fenced = false;                          // since it was initialised
  bool brought = false;                         // whether copies have brought bytes in this phase,
  bool unseen = false;                          // or in one that nobody has waited for
  u32 event;                                    // its count is `phase`
  Race::View arriving = {}, over = {};          // of those who arrived, those of phases that are over
  Race::View far_arriving = {}, far_over = {};  // the same of threads of other blocks

  Mbarrier(u32 offset, u32 count)
      : offset(offset), count(count), missing(count), initialiser(cluster.current->index), event(race.new_event()) {}

  string name() const { return "the mbarrier at " + byte_at(offset); }
  string lacks() const { return text("phase %u lacks %u of %u arrivals and %d bytes", phase, missing, count, bytes); }
  string waiting() const override { return "in mbarrier_wait_parity of " + name() + ", whose " + lacks(); }
  uint64_t mark() const { return 0x7ff4'5a5a'0000'0000u + offset; }

  // They may come before they are announced, as long as arrivals are missing.
  void count_bytes(const char* by, int change) {
    bytes += change;
    if (bytes >= 1 << 20 || bytes <= -(1 << 20))
      fail(text("%s: an mbarrier counts at most %u bytes, not %d", by, (1 << 20) - 1, bytes));
  }
  void end_phase_if_complete() {
    if (missing) return;
    if (bytes < 0) fail(name() + text(" got %d bytes more than its phase %u expects", -bytes, phase));
    if (bytes > 0) return;
    ++phase;
    missing = count;
    over = arriving;
    far_over = far_arriving;
    unseen |= brought;
    brought = false;
    wake(*this);
  }
  void bring(u32 count_of_bytes) {
    count_bytes("a copy", -(int)count_of_bytes);
    brought = true;
    end_phase_if_complete();
  }
};

inline std::map<u32, Mbarrier> mbarriers;  // by offset

inline Mbarrier& mbarrier_at(const char* name, u32 offset) {
  const auto found = mbarriers.find(offset);
  if (found == mbarriers.end())
    fail_here(text("%s at ", name) + byte_at(offset) + ", where no mbarrier was initialised");
  const uint64_t mark = found->second.mark();
  if (memcmp(shared.begin + offset, &mark, 8) != 0)
    fail_here(text("%s at ", name) + byte_at(offset) + ", where something was written over the mbarrier");
  race.check_read(offset, 8, name);
  return found->second;
}

inline void init_mbarrier(u32 address, u32 count) {
  const u32 offset = shared.check("mbarrier_init", address, 8);
  if (count == 0 || count >= 1 << 20) fail_here(text("mbarrier_init for %u arrivals", count));
  if (mbarriers.count(offset)) fail_here("mbarrier_init at " + byte_at(offset) + ", where one is in use");
  note_write(offset, 8, "mbarrier_init");
  const uint64_t mark = mbarriers.emplace(offset, Mbarrier(offset, count)).first->second.mark();
  memcpy(shared.begin + offset, &mark, 8);
}

inline void fence_mbarriers() {
  for (auto& [offset, each] : mbarriers) each.fenced |= each.initialiser == cluster.current->index;
}

inline void arrive_at(const char* name, u32 offset, u32 bytes) {
  Mbarrier& mbarrier = mbarrier_at(name, offset);
  if (mbarrier.missing == 0)
    fail_here(text("%s: one arrival more than the %u of ", name, mbarrier.count) + mbarrier.name() + ", whose " +
              mbarrier.lacks());
  if (bytes >= 1 << 20) fail_here(text("%s announces %u bytes: an mbarrier counts less than 2^20", name, bytes));
  mbarrier.count_bytes(name, (int)bytes);
  const u32 rank = rank_at(offset);
  if (rank == cluster.current->rank) {
    race.release(cluster.current->index, mbarrier.arriving);
  } else {
    race.release(cluster.current->index, mbarrier.far_arriving);
    race.use_far(rank, cluster.current->index);
  }
  --mbarrier.missing;
  mbarrier.end_phase_if_complete();
  maybe_leave_warp();
}

inline void arrive_at_own(const char* name, u32 address, u32 bytes) {
  arrive_at(name, shared.check(name, address, 8), bytes);
}

// Arrivals from other blocks are seen by those only who wait for them (`far`).
inline void wait_for_parity(const char* name, u32 address, u32 parity, bool far) {
  Mbarrier& mbarrier = mbarrier_at(name, shared.check(name, address, 8));
  if (parity > 1) fail_here(text("%s for parity %u", name, parity));
  if (cluster.random.below(8) == 0) advance_a_transfer();
  while (mbarrier.phase % 2 == parity) sleep_until(mbarrier);
  mbarrier.unseen = false;
  race.acquire(mbarrier.over, mbarrier.event, mbarrier.phase);
  if (far) race.acquire(mbarrier.far_over, mbarrier.event, mbarrier.phase);
  maybe_leave_warp();
}

}  // namespace engine
