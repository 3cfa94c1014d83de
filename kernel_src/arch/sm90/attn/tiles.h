// Which blocks of query rows a block of threads works through, where fewer blocks are launched than there is work.
#pragma once
#include "attn/mask.h"
#include "attn/schedule.h"
#include "base/math.h"
#include "mbarrier.h"

namespace attn {

// Heads whose keys and values fit into the second-level cache together go together. Under a causal mask the last rows
// see the most keys: two blocks of rows from both ends of a head, which take as long as any other two, are dealt out as
// one piece, or where a head has few and they do not go up, the last of all heads first and every other round in the
// opposite order.
template <class C, class P>
struct Tiles {
  P const& p;
  i32 per_head, heads, together, pieces, round = 0, part = 0;
  bool paired;

  METHOD explicit Tiles(P const& p) : p(p) {
    constexpr i64 cache_bytes = 32 << 20;
    const i64 bytes = (i64)p.seq_kv * (C::head_dim + C::head_dim_v) * (i64)sizeof(typename C::Element);
    const i64 heads_kv = base::most<i64>(1, cache_bytes / base::most<i64>(1, bytes));
    per_head = base::ceil_div((i32)p.seq_q, C::block_m);
    paired = C::causal && (per_head % 2 == 0 || per_head > 32);
    heads = (i32)(p.batch * p.heads_q);
    together = (i32)base::least<i64>(heads, heads_kv * (p.heads_q / p.heads_kv));
    pieces = paired ? base::ceil_div(per_head, 2) : per_head;  // of a head
  }

  METHOD bool more() const { return index() < heads * pieces; }
  METHOD void next() {
    if (paired && part == 0 && 2 * rank() + 1 < per_head)
      part = 1;
    else
      part = 0, ++round;
  }
  METHOD QueryBlock tile() const {
    const i32 head = section() * together + rest() % here();
    QueryBlock b;
    b.split = 0;
    b.batch = head / (i32)p.heads_q;
    b.head = head % (i32)p.heads_q;
    b.head_kv = b.head / (i32)(p.heads_q / p.heads_kv);
    b.first = (part ? rank() : per_head - 1 - rank()) * C::block_m;
    b.rows = base::least(C::block_m, (i32)p.seq_q - b.first);
    return b;
  }

 private:
  METHOD i32 index() const {
    const i32 blocks = (i32)ptx::block_count(), mine = (i32)ptx::block_index();
    return round * blocks + (C::causal && !paired && round % 2 ? blocks - 1 - mine : mine);
  }
  METHOD i32 section() const { return index() / (together * pieces); }
  METHOD i32 rest() const { return index() % (together * pieces); }
  METHOD i32 here() const { return base::least(together, heads - section() * together); }
  METHOD i32 rank() const { return rest() / here(); }  // of the piece in its head
};

}  // namespace attn
