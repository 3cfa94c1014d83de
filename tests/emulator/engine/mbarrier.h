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
  bool fenced = false;                  // since it was initialised
  bool brought = false;                 // whether copies have brought bytes in this phase,
  bool unseen = false;                  // or in one that nobody has waited for
  u32 event;                            // its count is `phase`
  Race::View arriving = {}, over = {};  // of those who arrived, those of phases that are over

  Mbarrier(u32 offset, u32 count)
      : offset(offset), count(count), missing(count), initialiser(block.current->index), event(race.new_event()) {}

  string name() const { return text("the mbarrier at shared byte %u", offset); }
  string lacks() const { return text("phase %u lacks %u of %u arrivals and %d bytes", phase, missing, count, bytes); }
  string waiting() const override { return "in mbarrier_wait_parity of " + name() + ", whose " + lacks(); }
  uint64_t mark() const { return 0x7ff4'5a5a'0000'0000u + offset; }

  void end_phase_if_complete() {
    if (missing) return;
    if (bytes < 0) fail(name() + text(" got %d bytes more than its phase %u expects", -bytes, phase));
    if (bytes > 0) return;
    ++phase;
    missing = count;
    over = arriving;
    unseen |= brought;
    brought = false;
    wake(*this);
  }
  void bring(u32 count_of_bytes) {
    bytes -= (int)count_of_bytes;
    brought = true;
    end_phase_if_complete();
  }
};

inline std::map<u32, Mbarrier> mbarriers;  // by offset

inline Mbarrier& mbarrier_at(const char* name, u32 address) {
  const u32 offset = shared.check(name, address, 8);
  const auto found = mbarriers.find(offset);
  if (found == mbarriers.end())
    fail_here(text("%s at shared byte %u, where no mbarrier was initialised", name, offset));
  const uint64_t mark = found->second.mark();
  if (memcmp(shared.begin + offset, &mark, 8) != 0)
    fail_here(text("%s at shared byte %u, where something was written over the mbarrier", name, offset));
  race.check_read(offset, 8, name);
  return found->second;
}

inline void init_mbarrier(u32 address, u32 count) {
  const u32 offset = shared.check("mbarrier_init", address, 8);
  if (count == 0 || count >= 1 << 20) fail_here(text("mbarrier_init for %u arrivals", count));
  if (mbarriers.count(offset)) fail_here(text("mbarrier_init at shared byte %u, where one is in use", offset));
  note_write(offset, 8, "mbarrier_init");
  const uint64_t mark = mbarriers.emplace(offset, Mbarrier(offset, count)).first->second.mark();
  memcpy(shared.begin + offset, &mark, 8);
}

inline void fence_mbarriers() {
  for (auto& [offset, each] : mbarriers) each.fenced |= each.initialiser == block.current->index;
}

inline void arrive_at(const char* name, u32 address, u32 bytes) {
  Mbarrier& mbarrier = mbarrier_at(name, address);
  if (mbarrier.missing == 0)
    fail_here(text("%s: one arrival more than the %u of ", name, mbarrier.count) + mbarrier.name() + ", whose " +
              mbarrier.lacks());
  mbarrier.bytes += (int)bytes;
  if (bytes >= 1 << 20 || mbarrier.bytes >= 1 << 20)
    fail_here(text("%s: an mbarrier counts at most %u bytes, not %d", name, (1 << 20) - 1, mbarrier.bytes));
  race.release(block.current->index, mbarrier.arriving);
  --mbarrier.missing;
  mbarrier.end_phase_if_complete();
  maybe_leave_warp();
}

inline void wait_for_parity(u32 address, u32 parity) {
  Mbarrier& mbarrier = mbarrier_at("mbarrier_wait_parity", address);
  if (parity > 1) fail_here(text("mbarrier_wait_parity for parity %u", parity));
  if (block.random.below(8) == 0) advance_a_transfer();
  while (mbarrier.phase % 2 == parity) sleep_until(mbarrier);
  mbarrier.unseen = false;
  race.acquire(mbarrier.over, mbarrier.event, mbarrier.phase);
  maybe_leave_warp();
}

}  // namespace engine
