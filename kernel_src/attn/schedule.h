// Which piece of the work a block index stands for.
#pragma once
#include "base/math.h"
#include "qualifiers.h"

namespace attn {

struct QueryBlock {
  i64 batch, head, head_kv;
  i64 first, rows;  // query rows
};

// Within a head the last rows come first: under a causal mask they see the most keys, and light blocks fill the end.
template <class C, class P>
FN QueryBlock query_block(i64 block, P const& p) {
  const i64 per_head = (p.seq_q + C::block_m - 1) / C::block_m;
  const i64 head = block / per_head, first = (per_head - 1 - block % per_head) * C::block_m;
  QueryBlock b;
  b.batch = head / p.heads_q;
  b.head = head % p.heads_q;
  b.head_kv = b.head / (p.heads_q / p.heads_kv);
  b.first = first;
  b.rows = base::least<i64>(C::block_m, p.seq_q - first);
  return b;
}

struct KeyRange {
  i64 batch, head_kv, split;
  i64 first, end;  // keys
};

// The keys are cut into p.splits runs of whole tiles; each run has its own partial dQ.
template <class C, class P>
FN KeyRange key_range(i64 block, P const& p) {
  const i64 tiles = (p.seq_kv + C::block_n - 1) / C::block_n, per_split = (tiles + p.splits - 1) / p.splits;
  KeyRange r;
  r.split = block % p.splits;
  r.head_kv = block / p.splits % p.heads_kv;
  r.batch = block / p.splits / p.heads_kv;
  r.first = base::least<i64>(p.seq_kv, r.split * per_split * C::block_n);
  r.end = base::least<i64>(p.seq_kv, r.first + per_split * C::block_n);
  return r;
}

}  // namespace attn
