// Copies between global and shared memory, of boxes above all, and between the shared memories of blocks. They are made
// late, in a random order: when nothing else can go on, when a thread waits for them, or now and then. What one will
// bring to shared memory is NaN until then.
#pragma once
#include "mbarrier.h"

namespace engine {

// What tests/emulator/boxes.py puts where a GPU's driver would put a tensor map. Sizes, strides and coordinates go from
// the innermost dimension on.
struct TensorMap {
  static constexpr u32 row_bytes = 128;  // of a box: what is swizzled as one row
  static constexpr uint64_t right_mark = 0x70616d20726f736e;

  uint64_t mark, base;
  int64_t sizes[4], strides[3];  // strides in bytes, from the second dimension on
  u32 columns, rows, element_bytes;

  static TensorMap of(const char* name, const void* at) {
    TensorMap map;
    memcpy(&map, at, sizeof map);
    if (map.mark != right_mark) fail_here(text("%s with something else than a tensor map", name));
    if (map.base % 16)
      fail_here(text("%s: the tensor's address %#llx is not aligned to 16", name, (unsigned long long)map.base));
    for (int64_t stride : map.strides)
      if (stride % 16 || stride < 0)
        fail_here(text("%s: a stride of %lld bytes is not aligned to 16", name, (long long)stride));
    if (map.columns * map.element_bytes != row_bytes || map.rows == 0 || map.rows > 256)
      fail_here(text("%s with boxes of %u rows of %u elements: at most 256 of %u bytes are to be had", name, map.rows,
                     map.columns, row_bytes));
    return map;
  }
};

struct Transfer {
  // 16 bytes of shared memory, and those from `begin` to `end` of the 16 at `address`: a box may have others, which lie
  // outside of its tensor.
  struct Chunk {
    u32 offset;
    char* address;
    u32 begin, end;
  };
  static constexpr u32 global = ~0u;
  const char* name;
  u32 thread;
  u32 offset, bytes;  // in shared memory, as a whole
  vector<Chunk> chunks = {};
  Mbarrier* mbarrier = nullptr;  // of what comes to shared memory
  u32 from = global;             // where else it is in shared memory
  u32 group = 0;                 // of a store
  bool done = false;

  void make() {
    done = true;
    for (Chunk const& x : chunks) {
      char* at = shared.begin + x.offset;
      if (mbarrier) {
        memset(at, 0, 16);
        memcpy(at + x.begin, x.address + x.begin, x.end - x.begin);
      } else {
        memcpy(x.address + x.begin, at + x.begin, x.end - x.begin);
      }
    }
    if (!mbarrier) return;
    traffic.end_write(offset, bytes);
    const u32 over = mbarrier->phase + 1;  // when this phase is
    race.written_with(over, offset, bytes);
    if (from != global) {
      traffic.end_send(from, bytes);
      race.read_until(mbarrier->event, over, race.slot_of_copies(rank_at(offset)), from, bytes);
      if (rank_at(from) != rank_at(offset)) race.use_far_until(rank_at(from), mbarrier->event, over);
    }
    mbarrier->bring(bytes);
  }
};

inline vector<Transfer> transfers;  // stores that nobody has waited for, others that are not done

// A thread's stores, in groups.
struct Stores {
  u32 committed = 0, event = 0;  // the event counts groups that were waited for
};
inline std::map<u32, Stores> stores;  // by thread

inline void forget_done() {
  const auto over = [](Transfer const& each) { return each.done && each.mbarrier; };
  transfers.erase(std::remove_if(transfers.begin(), transfers.end(), over), transfers.end());
}

inline bool advance_a_transfer() {
  vector<u32> due;
  for (u32 i = 0; i < transfers.size(); ++i)
    if (!transfers[i].done) due.push_back(i);
  if (due.empty()) return false;
  transfers[due[cluster.random.below((u32)due.size())]].make();
  forget_done();
  return true;
}

// Of a box at these coordinates.
inline Transfer transfer_of_box(const char* name, const void* tensor_map, u32 address, const int (&at)[4],
                                bool writes) {
  const TensorMap map = TensorMap::of(name, tensor_map);
  if (address % 1024) fail_here(text("%s at shared address %#x, which is not aligned to 1024", name, address));
  const u32 bytes = map.rows * TensorMap::row_bytes;
  Transfer x = {name, cluster.current->index, shared.check_range(name, address, bytes), bytes};
  const int64_t size = map.element_bytes, columns_end = map.sizes[0] * size;
  for (u32 row = 0; row < map.rows; ++row) {
    const int64_t place[3] = {(int64_t)at[1] + row, at[2], at[3]};
    bool inside = true;
    uint64_t line = map.base;
    for (u32 i = 0; i < 3; ++i) {
      inside = inside && place[i] >= 0 && place[i] < map.sizes[i + 1];
      line += (uint64_t)(place[i] * map.strides[i]);
    }
    for (u32 byte = 0; byte < TensorMap::row_bytes; byte += 16) {
      const int64_t first = at[0] * size + byte;
      const u32 begin = (u32)std::clamp<int64_t>(-first, 0, 16),
                end = (u32)std::clamp<int64_t>(columns_end - first, 0, 16);
      char* from = reinterpret_cast<char*>(line + (uint64_t)first);
      const bool some = inside && begin < end;
      if (some) check_global(name, from + begin, end - begin, writes, false);
      x.chunks.push_back(
          {shared.swizzled(x.offset + row * TensorMap::row_bytes + byte), from, some ? begin : 0, some ? end : 0});
    }
  }
  return x;
}

// To shared memory, its bytes to arrive at the mbarrier at an offset.
inline void begin_load(Transfer x, u32 mbarrier) {
  x.mbarrier = &mbarrier_at(x.name, mbarrier);
  if (!x.mbarrier->fenced)
    fail_here(text("%s with ", x.name) + x.mbarrier->name() + ", initialised without a fence_mbarrier_init");
  const bool of_block = x.from != Transfer::global;
  for (auto& chunk : x.chunks) {
    Traffic::Unit& unit = traffic.begin_write(chunk.offset, x.name);
    (of_block ? unit.received : unit.loaded) = true;
  }
  race.write_until(x.mbarrier->event, of_block ? Race::Kind::bulk_copy_far : Race::Kind::tma_load, x.offset, x.bytes,
                   x.name);
  memset(shared.begin + x.offset, 0xff, x.bytes);
  transfers.push_back(std::move(x));
  maybe_leave_warp();
}
inline void begin_load_of_box(u32 to, const void* map, u32 mbarrier, const int (&at)[4]) {
  begin_load(transfer_of_box("tma_load", map, to, at, false), shared.check("tma_load", mbarrier, 8));
}
inline void begin_load_of_bytes(u32 to, const char* from, u32 bytes, u32 mbarrier) {
  constexpr const char* name = "bulk_load";
  if (to % 16 || reinterpret_cast<uint64_t>(from) % 16 || bytes % 16 || bytes == 0)
    fail_here(text("%s of %u bytes from global address %p to shared address %#x: all must be multiples of 16", name,
                   bytes, (const void*)from, to));
  check_global(name, from, bytes, false, false);
  Transfer x = {name, cluster.current->index, shared.check_range(name, to, bytes), bytes};
  for (u32 i = 0; i < bytes; i += 16) x.chunks.push_back({x.offset + i, const_cast<char*>(from) + i, 0, 16});
  begin_load(std::move(x), shared.check(name, mbarrier, 8));
}
inline void begin_copy_far(u32 far_to, u32 from, u32 bytes, u32 far_mbarrier) {
  constexpr const char* name = "bulk_copy_far";
  if (far_to % 16 || from % 16 || bytes % 16 || bytes == 0)
    fail_here(
        text("%s of %u bytes from shared address %#x to %#x: all must be multiples of 16", name, bytes, from, far_to));
  Transfer x = {name, cluster.current->index, shared.check_far_range(name, far_to, bytes), bytes};
  x.from = shared.check_range(name, from, bytes);
  const u32 mbarrier = shared.check_far(name, far_mbarrier, 8), rank = rank_at(x.offset);
  if (rank_at(mbarrier) != rank)
    fail_here(
        text("%s to block %u with an mbarrier of block %u", name, block_number(rank), block_number(rank_at(mbarrier))));
  race.check_read(x.from, bytes, name);
  for (u32 i = 0; i < bytes; i += 16) {
    ++traffic.begin_read(x.from + i, name).sent;
    x.chunks.push_back({x.offset + i, shared.begin + x.from + i, 0, 16});
  }
  race.read_until(mbarrier_at(name, mbarrier).event, Race::under_way, race.slot_of_copies(rank), x.from, bytes);
  begin_load(std::move(x), mbarrier);
}

inline void begin_store(const void* map, u32 from, const int (&at)[4]) {
  Transfer x = transfer_of_box("tma_store", map, from, at, true);
  Stores& mine = stores[x.thread];
  if (!mine.event) mine.event = race.new_event();
  x.group = mine.committed;
  for (auto& chunk : x.chunks) ++traffic.begin_read(chunk.offset, x.name).stores;
  race.check_read(x.offset, x.bytes, x.name);
  race.read_until(mine.event, x.group + 1, race.slot_of_stores(), x.offset, x.bytes);
  transfers.push_back(std::move(x));
  maybe_leave_warp();
}
inline void commit_stores() { ++stores[cluster.current->index].committed; }

inline void wait_for_stores(u32 pending) {
  const u32 me = cluster.current->index;
  Stores& mine = stores[me];
  const u32 over = mine.committed > pending ? mine.committed - pending : 0;
  const auto due = [&](Transfer const& x) { return !x.mbarrier && x.thread == me && x.group < over; };
  // They end in any order.
  cluster.random.shuffle(transfers.data(), (u32)transfers.size());
  for (Transfer& x : transfers) {
    if (!due(x)) continue;
    if (!x.done) x.make();
    for (auto& chunk : x.chunks) --traffic.units[chunk.offset / Traffic::unit].stores;
  }
  transfers.erase(std::remove_if(transfers.begin(), transfers.end(), due), transfers.end());
  if (mine.event) race.acquire({}, mine.event, over);
}

// ---- at the begin of a cluster, and the end of a block

inline void start_mbarriers_and_transfers() {
  mbarriers.clear();
  transfers.clear();
  stores.clear();
}

inline void finish_mbarriers_and_transfers(u32 rank) {
  for (Transfer const& x : transfers) {
    if (!x.mbarrier) continue;
    if (rank_at(x.offset) == rank) fail(text("it ends while a %s of ", x.name) + x.mbarrier->name() + " is under way");
    if (x.from != Transfer::global && rank_at(x.from) == rank)
      fail(text("it ends while a %s out of its shared memory is under way", x.name));
  }
  for (auto& [offset, each] : mbarriers)
    if (rank_at(offset) == rank && (each.unseen || each.brought))
      fail("it ends, and nobody has waited for what a load brought to " + each.name());
  race.check_end(rank);
}

// Stores that nobody has waited for.
inline void finish_stores() {
  while (advance_a_transfer()) continue;
}

}  // namespace engine
