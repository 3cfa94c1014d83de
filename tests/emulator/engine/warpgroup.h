// Four warps that must do the same where instructions are those of a warpgroup. They need not do it at the same time.
#pragma once
#include "order.h"

namespace engine {

struct Warpgroup : Event {
  static constexpr u32 warps = 4;
  struct Step {
    const char* name;
    uint64_t operands[3];
    bool operator==(Step const& other) const {
      return strcmp(name, other.name) == 0 && memcmp(operands, other.operands, sizeof operands) == 0;
    }
  };
  u32 index = 0;     // in the cluster
  u32 in_block = 0;  // its index there
  vector<Step> steps;
  u32 taken[warps] = {};  // steps, by each warp
  u32 registers = 0;      // of each thread, if setmaxnreg said so

  string waiting() const override { return "in wgmma_wait, for other warps of its warpgroup"; }

  // What the current warp does must be what the others do.
  void take(u32 warp, Step const& step) {
    u32& mine = taken[warp];
    if (mine == steps.size()) steps.push_back(step);
    const Step& theirs = steps[mine++];
    if (step == theirs) return;
    const bool same = strcmp(step.name, theirs.name) == 0;
    fail_here(
        text("divergent warpgroup: its warps come to %s %s", step.name, same ? "with different operands" : "and ") +
        (same ? "" : theirs.name));
  }
};

inline vector<Warpgroup> warpgroups;

inline u32 warp_in_group() { return warp_of(cluster.current->in_block) % Warpgroup::warps; }
inline u32 warpgroups_of_block() { return cluster.block_warps / Warpgroup::warps; }

inline Warpgroup& own_warpgroup(const char* name) {
  const u32 in_block = warp_of(cluster.current->in_block) / Warpgroup::warps;
  if (in_block >= warpgroups_of_block()) fail_here(text("%s in a warpgroup of less than four warps", name));
  return warpgroups[cluster.current->rank * warpgroups_of_block() + in_block];
}

inline void set_registers(const char* name, u32 count) {
  if (count < 24 || count > 256 || count % 8)
    fail_here(text("%s to %u registers: multiples of 8 from 24 to 256 are to be had", name, count));
  Warpgroup& group = own_warpgroup(name);
  group.take(warp_in_group(), {name, {count, 0, 0}});
  group.registers = count;
  u32 all = 0;
  for (u32 i = 0; i < warpgroups_of_block(); ++i) {
    const Warpgroup& each = warpgroups[group.index - group.in_block + i];
    if (!each.registers) return;
    all += each.registers * Warpgroup::warps * lanes;
  }
  if (all > 65536) fail_here(text("%s: the block's warpgroups have %u registers, more than there are", name, all));
}

}  // namespace engine
