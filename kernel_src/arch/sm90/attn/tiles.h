// Which blocks of query rows a block of threads works through, where fewer blocks are launched than there is work.
#pragma once
#include "attn/mask.h"
#include "attn/schedule.h"
#include "base/math.h"
#include "mbarrier.h"

namespace attn {

// Heads whose keys and values fit into the second-level cache together go together. Of these, the last rows of all
// come first: under a causal mask they see the most keys. Blocks of threads deal the work out to themselves in turns,
// every other round in the opposite order, so that all get long and short pieces alike.
template <class C, class P>
struct Tiles {
  P const& p;
  i32 per_head, heads, together, count, round = 0;

  METHOD explicit Tiles(P const& p) : p(p) {
    constexpr i64 cache_bytes = 24 << 20;
    const i64 bytes = (i64)p.seq_kv * (C::head_dim + C::head_dim_v) * (i64)sizeof(typename C::Element);
    const i64 heads_kv = base::most<i64>(1, cache_bytes / base::most<i64>(1, bytes));
    per_head = base::ceil_div((i32)p.seq_q, C::block_m);
    heads = (i32)(p.batch * p.heads_q);
    together = (i32)base::least<i64>(heads, heads_kv * (p.heads_q / p.heads_kv));
    count = heads * per_head;
  }

  METHOD bool more() const { return index() < count; }
  METHOD void next() { ++round; }
  METHOD QueryBlock tile() const {
    const i32 section = index() / (together * per_head), rest = index() % (together * per_head);
    const i32 here = base::least(together, heads - section * together), head = section * together + rest % here;
    QueryBlock b;
    b.split = 0;
    b.batch = head / (i32)p.heads_q;
    b.head = head % (i32)p.heads_q;
    b.head_kv = b.head / (i32)(p.heads_q / p.heads_kv);
    b.first = (per_head - 1 - rest / here) * C::block_m;
    b.rows = base::least(C::block_m, (i32)p.seq_q - b.first);
    return b;
  }

 private:
  METHOD i32 index() const {
    const i32 blocks = (i32)ptx::block_count(), mine = (i32)ptx::block_index();
    return round * blocks + (round % 2 ? blocks - 1 - mine : mine);
  }
};

}  // namespace attn
