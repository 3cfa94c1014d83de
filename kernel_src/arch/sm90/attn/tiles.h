// Which blocks of query rows a block of threads works through, where fewer blocks are launched than there is work.
#pragma once
#include "attn/mask.h"
#include "attn/schedule.h"
#include "base/math.h"
#include "mbarrier.h"

namespace attn {

// Pieces are dealt out in turns. Without a mask a piece is a block of rows, and those of a head are neighbours. Under a
// causal mask the last rows see the most keys: a piece is two blocks from both ends of a head, which take as long as
// any other two. Where a head has few, an odd number of them, the last blocks of all heads whose keys and values the
// second-level cache holds together come first, and every other round is dealt out in the opposite order.
template <class C, class P>
struct Tiles {
  METHOD explicit Tiles(P const& p) : p(p) {
    const u32 blocks = base::ceil_div((u32)p.seq_q, (u32)C::block_m);
    heads = (u32)(p.batch * p.heads_q);
    paired = C::causal && (blocks % 2 == 0 || blocks > 32);
    per_head = paired ? base::ceil_div(blocks, 2u) : blocks;
    together = C::causal && !paired ? heads_together() : 1;
    find();
  }

  METHOD bool more() const { return found; }
  METHOD QueryBlock tile() const {
    const u32 blocks = base::ceil_div((u32)p.seq_q, (u32)C::block_m);
    QueryBlock b;
    b.split = 0;
    b.batch = (i32)(head / (u32)p.heads_q);
    b.head = (i32)(head - (u32)b.batch * (u32)p.heads_q);
    b.head_kv = (i32)((u32)b.head / ((u32)p.heads_q / (u32)p.heads_kv));
    b.first = (i32)(second ? rank : blocks - 1 - rank) * C::block_m;
    b.rows = base::least(C::block_m, (i32)p.seq_q - b.first);
    return b;
  }
  METHOD void next() {
    if (paired && !second && 2 * rank + 1 < base::ceil_div((u32)p.seq_q, (u32)C::block_m)) {
      second = true;
      return;
    }
    second = false;
    ++round;
    find();
  }

 private:
  P const& p;
  u32 heads, per_head, together;  // per_head: pieces
  u32 round = 0, head, rank;      // rank: of the piece in its head
  bool paired, found, second = false;

  METHOD void find() {
    const u32 blocks = ptx::block_count(), mine = ptx::block_index();
    u32 index = round * blocks + (together > 1 && round % 2 ? blocks - 1 - mine : mine);
    found = index < heads * per_head;
    if (!found) return;
    if (!C::causal || together == 1) {
      head = index / per_head;
      rank = index - head * per_head;
    } else {
      const u32 section = index / (together * per_head);
      index -= section * together * per_head;
      const u32 here = base::least(together, heads - section * together);
      rank = index / here;
      head = section * together + index - rank * here;
    }
  }
  METHOD u32 heads_together() const {
    constexpr i64 cache_bytes = 32 << 20;
    const i64 bytes = (i64)p.seq_kv * (C::head_dim + C::head_dim_v) * (i64)sizeof(typename C::Element);
    return (u32)base::least<i64>(heads, base::most<i64>(1, cache_bytes / bytes) * (p.heads_q / p.heads_kv));
  }
};

// Blocks of keys for a backward pass, or for clusters of blocks of threads as many of these. Under a causal mask most
// rows see the first keys: a piece is two blocks from both ends of a head, which take as long as any other two, if
// their number is even. All follows from how many blocks were done before: registers are wanted for sums.
template <class C, class P>
struct KeyBlocks {
  static constexpr i32 keys = C::cluster * C::block_n;
  u32 done = 0;
  METHOD explicit KeyBlocks(P const& p) : p(p) {}
  METHOD bool more() const { return piece() < (u32)p.batch * (u32)p.heads_kv * pieces(); }
  METHOD KeyBlock block() const {
    const u32 head = piece() / pieces(), rank = piece() - head * pieces();
    return key_block<C>((i32)(head * per_head() + (paired() && done % 2 ? per_head() - 1 - rank : rank)), p, keys);
  }

 private:
  P const& p;

  METHOD u32 per_head() const { return base::ceil_div((u32)p.seq_kv, (u32)keys); }
  // In order, a block that has two pieces of a head would wait for itself: the last keys wait for all before.
  METHOD bool paired() const {
    const bool enough = !C::ordered || per_head() / 2 <= ptx::block_count() / C::cluster;
    return C::causal && per_head() % 2 == 0 && enough;
  }
  METHOD u32 pieces() const { return paired() ? per_head() / 2 : per_head(); }
  METHOD u32 piece() const {
    return (ptx::block_index() + (paired() ? done / 2 : done) * ptx::block_count()) / C::cluster;
  }
};

}  // namespace attn
