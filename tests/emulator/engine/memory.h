// Shared and global memory: every access is aligned to its size and inside of what the launch was given.
#pragma once
#include <sys/mman.h>
#include <string.h>
#include "block.h"
#include "race.h"
#include "traffic.h"

namespace engine {

// Shared addresses begin above 0, as they do on a GPU, aligned to no more than what launch.h of the GPU asks for. They
// are those of the thread's own block; far addresses have the rank of a block, plus 1, above them.
constexpr u32 shared_start = 1024, far_shift = 24;
constexpr u32 shared_room = 1 << 20;  // on either side, where nothing lies: accesses that are far out land there

// Blocks have their parts one after the other. Offsets count from the first one's begin.
struct Shared {
  static constexpr u32 all = most_blocks * shared_room;

  char* room = nullptr;  // the whole, of which a launch uses the middle
  char* begin = nullptr;
  u32 bytes = 0;  // of a block

  void start(u32 wanted) {
    if (!room) {
      constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      room = static_cast<char*>(mmap(nullptr, all + 2 * shared_room, PROT_READ | PROT_WRITE, flags, -1, 0));
      begin = room + shared_room + shared_start;
    }
    bytes = wanted;
    cluster.part_bytes = bytes / shared_start * shared_start + shared_start;  // as aligned as the first
    memset(begin, 0xff, cluster.size * cluster.part_bytes);                   // floats of all formats are NaN
  }
  bool near(const char* at) const { return room && at >= room && at < room + all + 2 * shared_room; }
  u32 own_part() const { return cluster.current->rank * cluster.part_bytes; }

  // The offset of `size` bytes at a shared address.
  u32 check(const char* name, u32 address, u32 size) const {
    check_aligned(name, address, size);
    return check_range(name, address, size);
  }
  u32 check_range(const char* name, u32 address, u32 size) const {
    if (address >> far_shift)
      fail_here(text("%s at %#x, a far address: it is for shared memory of the own block", name, address));
    return own_part() + check_in_part(name, address, size);
  }
  // The same at a far address.
  u32 check_far(const char* name, u32 address, u32 size) const {
    check_aligned(name, address, size);
    return check_far_range(name, address, size);
  }
  u32 check_far_range(const char* name, u32 address, u32 size) const {
    const u32 rank = (address >> far_shift) - 1;
    if (rank >= cluster.size)
      fail_here(text("%s at %#x, which is no far address: far_address makes them", name, address));
    const u32 offset = rank * cluster.part_bytes + check_in_part(name, address & ((1 << far_shift) - 1), size);
    if (!cluster.blocks[rank].running) fail_here(text("%s at ", name) + byte_at(offset) + ", and that block has ended");
    return offset;
  }
  // Where 16 bytes lie with 128-byte swizzle.
  static u32 swizzled(u32 offset) {
    const u32 address = offset + shared_start;
    return (address ^ (address >> 7 & 7) << 4) - shared_start;
  }

 private:
  static void check_aligned(const char* name, u32 address, u32 size) {
    if (address % size)
      fail_here(text("%s of %u bytes at shared address %#x, which is not aligned to them", name, size, address));
  }
  u32 check_in_part(const char* name, u32 address, u32 size) const {
    const u32 offset = address - shared_start;
    if (address < shared_start || offset + size > bytes)
      fail_here(text("%s of %u bytes at byte %d of a shared memory of %u bytes", name, size, (int)offset, bytes));
    return offset;
  }
};

inline Shared shared;

inline void note_write(u32 offset, u32 size, const char* name, bool pending = false) {
  traffic.write(offset, size, name);
  race.write(offset, size, name, pending);
}

inline void check_global(const char* name, const void* at, u32 size, bool writes, bool aligned = true) {
  const uint64_t address = reinterpret_cast<uint64_t>(at), end = address + size;
  if (aligned && address % size)
    fail_here(text("%s of %u bytes at global address %#llx, which is not aligned to them", name, size,
                   (unsigned long long)address));
  const Launch& launch = *cluster.launch;
  const Region* nearest = nullptr;
  for (int64_t i = 0; i < launch.region_count; ++i) {
    const Region& region = launch.regions[i];
    if (address >= region.begin && end <= region.end) {
      if (writes && !region.writable) fail_here(text("%s writes to %s, which is an input", name, region.name));
      return;
    }
    const auto distance = [&](const Region& r) { return address < r.begin ? r.begin - address : end - r.end; };
    if (!nearest || distance(region) < distance(*nearest)) nearest = &region;
  }
  if (!nearest) fail_here(text("%s of %u bytes at global address %p: the launch has no memory", name, size, at));
  const bool before = address < nearest->begin;
  fail_here(text("%s of %u bytes at global address %p: %llu bytes %s %s", name, size, at,
                 (unsigned long long)(before ? nearest->begin - address : end - nearest->end),
                 before ? "before" : "beyond the end of", nearest->name));
}

// ---- copies in the background: made late, and until then what they will overwrite is NaN

inline void begin_copy(u32 to, const char* from, u32 size, u32 valid) {
  if (valid > size) fail_here(text("copy_async of %u bytes is told that %u are valid", size, valid));
  const u32 offset = shared.check("copy_async", to, size);
  if (reinterpret_cast<uint64_t>(from) % size)
    fail_here(text("copy_async of %u bytes from global address %p, which is not aligned to them", size, (void*)from));
  if (valid) check_global("copy_async", from, valid, false, false);
  note_write(offset, size, "copy_async", true);
  memset(shared.begin + offset, 0xff, size);
  cluster.current->open.push_back({offset, size, valid, from});
}

inline void close_group() {
  Thread& thread = *cluster.current;
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

inline void finish_groups(u32 pending) {
  auto& groups = cluster.current->groups;
  if (groups.size() <= pending) return;
  vector<Copy> due;
  const auto end = groups.end() - pending;
  for (auto group = groups.begin(); group != end; ++group) due.insert(due.end(), group->begin(), group->end());
  groups.erase(groups.begin(), end);
  cluster.random.shuffle(due.data(), (u32)due.size());
  for (Copy const& copy : due) {
    char* to = shared.begin + copy.to;
    memcpy(to, copy.from, copy.valid);
    memset(to + copy.valid, 0, copy.size - copy.valid);
    race.arrive(copy.to, copy.size);
    traffic.write(copy.to, copy.size, "copy_async");
  }
}

}  // namespace engine
