// Products of warpgroups. A warp's rows are computed when it issues a product; until it has waited for them the
// registers are NaN. What products read in shared memory is theirs until a warp has waited for them: traffic.h and
// race.h see who writes there meanwhile.
#pragma once
#include <deque>
#include "memory.h"
#include "products.h"
#include "warpgroup.h"

namespace engine {

using emulator::WarpgroupProduct;

constexpr u32 most_columns = 256, product_rows = 64, product_depth = 16;

// An operand in shared memory: its 16 bytes at a time.
struct SharedOperand {
  u32 size;  // rows of a, columns of b
  bool by_rows;
  vector<u32> chunks;

  SharedOperand(uint64_t descriptor, u32 size, bool by_rows) : size(size), by_rows(by_rows) {
    const u32 address = (u32)(descriptor & 0x3fff) << 4, chunk_bytes = (u32)(descriptor >> 16 & 0x3fff) << 4;
    const u32 group_bytes = (u32)(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1 || group_bytes != 1024 || (descriptor >> 46 & 0xffff) != 0)
      fail_here(
          text("wgmma with the descriptor %#llx, which `swizzled` does not give", (unsigned long long)descriptor));
    const u32 in_group = address % 1024;
    if (in_group >= 128 || in_group % 32 || (by_rows && in_group && in_group / 2 + size > 64))
      fail_here(
          text("wgmma with an operand at shared address %#x, inside of 8 rows that are swizzled together", address));
    if (by_rows && size > 64 && (chunk_bytes % 1024 || chunk_bytes == 0))
      fail_here(text("wgmma with boxes of 64 columns %u bytes apart, which is not a multiple of 1024", chunk_bytes));
    const auto add = [&](u32 at) { chunks.push_back(shared.swizzled(shared.check("wgmma", at, 16))); };
    if (by_rows)
      for (u32 k = 0; k < product_depth; ++k)
        for (u32 i = 0; i < size; i += 8) add(address + i / 64 * chunk_bytes + k * 128 + i % 64 * 2);
    else
      for (u32 i = 0; i < size; ++i)
        for (u32 k = 0; k < product_depth; k += 8) add(address + i * 128 + k * 2);
  }

  // f(place among the rows of a or the columns of b, place along what is contracted, element).
  template <class F>
  void each(F f) const {
    const u32 per_line = by_rows ? size / 8 : product_depth / 8;
    for (u32 i = 0; i < chunks.size(); ++i) {
      u16 x[8];
      memcpy(x, shared.begin + chunks[i], 16);
      const u32 line = i / per_line, first = i % per_line * 8;
      for (u32 e = 0; e < 8; ++e) by_rows ? f(first + e, line, x[e]) : f(line, first + e, x[e]);
    }
  }
};

// What the warps of a warpgroup have in common of a product that is under way.
struct Product {
  u32 group;  // how many came before the one that it is in
  vector<u32> reads;
  double a[product_rows][product_depth], b[product_depth][most_columns];
};

// Sums of a warp's rows that its threads have not waited for.
struct SumsUnderWay {
  float* at[lanes];
  u32 size;  // of a thread's
  u32 group;
  vector<float> sums;  // [lane][i]
};

// What a warp's products find in its registers, which is theirs as well until then.
struct LeftUnderWay {
  const u32* at[lanes];
  u32 words[lanes][4];
  u32 group;
};

struct WarpProducts {
  u32 issued, committed;  // products, groups
  bool fenced;            // since threads may have used the registers
  vector<SumsUnderWay> sums;
  vector<LeftUnderWay> left;
};

struct WarpgroupProducts {
  std::deque<Product> under_way;
  u32 over, groups_over;  // products and groups that a warp has waited for
  u32 event;              // its count is that of the groups
  WarpProducts of_warp[Warpgroup::warps];
};

inline vector<WarpgroupProducts> products;  // of each warpgroup

inline WarpgroupProducts& own_products(Warpgroup const& group) {
  WarpgroupProducts& mine = products[group.index];
  if (!mine.event) mine.event = race.new_event();
  return mine;
}

// ---- registers

constexpr u32 under_way_bits = 0x7fdeadb5;  // a NaN

inline void hide(float* at, u32 size) {
  for (u32 i = 0; i < size; ++i) memcpy(at + i, &under_way_bits, 4);
}
inline void check_untouched(SumsUnderWay const& x) {
  for (u32 lane = 0; lane < lanes; ++lane)
    for (u32 i = 0; i < x.size; ++i)
      if (bits(x.at[lane][i]) != under_way_bits) fail_here("registers of a wgmma that is under way were changed");
}

inline void check_unchanged(LeftUnderWay const& x) {
  for (u32 lane = 0; lane < lanes; ++lane)
    if (memcmp(x.at[lane], x.words[lane], 16) != 0) fail_here("registers that a wgmma under way reads were changed");
}

// The sums of a product, with what they were before if they are added to.
inline SumsUnderWay& take_sums(WarpProducts& mine, const Exchange (&in)[lanes], u32 size, bool add) {
  float* at[lanes];
  for (u32 lane = 0; lane < lanes; ++lane) memcpy(&at[lane], in[lane].word, sizeof(float*));
  for (SumsUnderWay& each : mine.sums) {
    if (each.at[0] == at[0] && each.size == size) {
      check_untouched(each);
      return each;
    }
    if (at[0] < each.at[0] + each.size && each.at[0] < at[0] + size)
      fail_here("wgmma with a part of the registers of another one that is under way");
  }
  if (!mine.fenced) fail_here("wgmma with registers that threads used, without a wgmma_fence between");
  mine.sums.push_back({});
  SumsUnderWay& x = mine.sums.back();
  memcpy(x.at, at, sizeof at);
  x.size = size;
  x.sums.resize(lanes * size);
  for (u32 lane = 0; lane < lanes; ++lane) {
    if (add) memcpy(&x.sums[lane * size], at[lane], size * sizeof(float));
    hide(at[lane], size);
  }
  return x;
}

// ---- products

inline double element(emulator::Format format, u16 half) {
  return format == emulator::Format::bf16 ? real((u32)half << 16) : float_of_f16(half);
}

inline Product read_operands(WarpgroupProduct const& kind, uint64_t a, uint64_t b, u32 group) {
  Product x;
  x.group = group;
  const auto read = [&](SharedOperand const& operand, auto place) {
    for (u32 at : operand.chunks) traffic.begin_read(at, "wgmma");
    operand.each([&](u32 i, u32 k, u16 half) { place(i, k) = element(kind.format, half); });
    x.reads.insert(x.reads.end(), operand.chunks.begin(), operand.chunks.end());
  };
  read({b, kind.columns, kind.b_by_rows}, [&](u32 i, u32 k) -> double& { return x.b[k][i]; });
  if (!kind.a_in_registers) read({a, product_rows, kind.a_by_rows}, [&](u32 i, u32 k) -> double& { return x.a[i][k]; });
  for (u32 at : x.reads) ++traffic.units[at / Traffic::unit].products;
  return x;
}

// Sums of a warp's 16 rows.
inline void multiply(WarpgroupProduct const& kind, Product const& x, const Exchange (&in)[lanes], SumsUnderWay& to) {
  double rows_of_a[16][product_depth], sums[16][most_columns];
  memcpy(rows_of_a, x.a[warp_in_group() * 16], sizeof rows_of_a);
  const auto each_sum = [&](auto f) {
    for (u32 lane = 0; lane < lanes; ++lane)
      for (u32 i = 0; i < to.size; ++i)
        f(to.sums[lane * to.size + i], sums[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
  };
  if (kind.a_in_registers)
    for (u32 lane = 0; lane < lanes; ++lane)
      for (u32 i = 0; i < 4; ++i)
        for (u32 e = 0; e < 2; ++e)
          rows_of_a[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + e] =
              element(kind.format, (u16)(in[lane].word[2 + i] >> 16 * e));
  each_sum([&](float& thread, double& sum) { sum = kind.add ? thread : 0.0; });
  for (u32 row = 0; row < 16; ++row)
    add_products(sums[row], rows_of_a[row], x.b[0], product_depth, kind.columns, most_columns);
  each_sum([&](float& thread, double& sum) { thread = (float)sum; });
}

inline void issue(WarpgroupProduct const& kind, const Exchange (&in)[lanes]) {
  constexpr u32 a_words = 2, b_words = 6, kind_word = 8, a_at = 10;  // in.word; see emulator::multiply_async
  const u32 first = kind.a_in_registers ? b_words : a_words;
  for (const Exchange& each : in)
    if (memcmp(each.word + first, in[0].word + first, (kind_word + 1 - first) * 4) != 0)
      fail_here("divergent warp: its lanes come to wgmma with different operands");
  uint64_t a = 0, b;
  if (!kind.a_in_registers) memcpy(&a, in[0].word + a_words, 8);
  memcpy(&b, in[0].word + b_words, 8);

  Warpgroup& group = own_warpgroup("wgmma");
  group.take(warp_in_group(), {"wgmma", {a, b, in[0].word[kind_word]}});
  WarpgroupProducts& common = own_products(group);
  WarpProducts& mine = common.of_warp[warp_in_group()];
  if (kind.a_in_registers && !mine.fenced)
    fail_here("wgmma with registers that threads used, without a wgmma_fence between");
  const u32 index = mine.issued++ - common.over;
  if (index == common.under_way.size()) {
    common.under_way.push_back(read_operands(kind, a, b, mine.committed));
    for (u32 at : common.under_way.back().reads)
      race.read_until(common.event, mine.committed + 1, race.slot_of_warpgroup(group.in_block), at, 16);
  }
  Product& product = common.under_way[index];
  race.check_reads_of_warp(product.reads, "wgmma");
  SumsUnderWay& sums = take_sums(mine, in, kind.columns / 2, kind.add);
  sums.group = product.group;
  if (kind.a_in_registers) {
    LeftUnderWay& left = mine.left.emplace_back();
    left.group = product.group;
    for (u32 lane = 0; lane < lanes; ++lane) {
      memcpy(&left.at[lane], in[lane].word + a_at, sizeof(u32*));
      memcpy(left.words[lane], in[lane].word + a_words, sizeof left.words[lane]);
    }
  }
  multiply(kind, product, in, sums);
}

inline void fence_products() {
  Warpgroup& group = own_warpgroup("wgmma_fence");
  group.take(warp_in_group(), {"wgmma_fence", {}});
  own_products(group).of_warp[warp_in_group()].fenced = true;
}
inline void commit_products() {
  Warpgroup& group = own_warpgroup("wgmma_commit");
  group.take(warp_in_group(), {"wgmma_commit", {}});
  ++own_products(group).of_warp[warp_in_group()].committed;
  wake(group);
}

template <class T>
void forget(vector<T>& under_way, u32 groups_over) {
  const auto over = [&](T const& each) { return each.group < groups_over; };
  under_way.erase(std::remove_if(under_way.begin(), under_way.end(), over), under_way.end());
}

// A warp's sums of groups that are over reach its registers.
inline void deliver(WarpProducts& mine, u32 groups_over) {
  for (LeftUnderWay const& each : mine.left)
    if (each.group < groups_over) check_unchanged(each);
  for (SumsUnderWay& each : mine.sums) {
    if (each.group >= groups_over) continue;
    check_untouched(each);
    for (u32 lane = 0; lane < lanes; ++lane) memcpy(each.at[lane], &each.sums[lane * each.size], each.size * 4);
  }
  forget(mine.sums, groups_over);
  forget(mine.left, groups_over);
}

// For each lane, when its warp has met.
inline void wait_for_products(u32 pending) {
  Warpgroup& group = own_warpgroup("wgmma_wait");
  WarpgroupProducts& common = own_products(group);
  WarpProducts& mine = common.of_warp[warp_in_group()];
  const u32 over = mine.committed > pending ? mine.committed - pending : 0;
  const auto is_over = [&] {
    return std::all_of(common.of_warp, common.of_warp + Warpgroup::warps, [&](auto& x) { return x.committed >= over; });
  };
  while (!is_over()) sleep_until(group);
  for (; !common.under_way.empty() && common.under_way.front().group < over; ++common.over) {
    for (u32 at : common.under_way.front().reads) --traffic.units[at / Traffic::unit].products;
    common.under_way.pop_front();
  }
  deliver(mine, over);
  mine.fenced = false;
  race.acquire({}, common.event, over);
}

// ---- at the begin of a cluster, and the end of a block

inline void start_warpgroups() {
  const u32 of_block = warpgroups_of_block();
  warpgroups.assign(cluster.size * of_block, {});
  for (u32 i = 0; i < warpgroups.size(); ++i) warpgroups[i].index = i, warpgroups[i].in_block = i % of_block;
  products.assign(warpgroups.size(), {});
}

inline void finish_warpgroups(u32 rank) {
  for (u32 i = 0; i < warpgroups_of_block(); ++i) {
    const Warpgroup& group = warpgroups[rank * warpgroups_of_block() + i];
    for (u32 taken : group.taken)
      if (taken != group.steps.size())
        fail(text("it ends, and only a part of warpgroup %u has come to %s", group.in_block, group.steps[taken].name));
    if (!products[group.index].under_way.empty())
      fail(text("it ends, and warpgroup %u has not waited for a wgmma", group.in_block));
  }
}

}  // namespace engine
