// Which piece of the work a block index stands for. Blocks, rows and keys are counted with 32 bits (jitattn/plan.py
// refuses more); only offsets into tensors need 64.
#pragma once
#include "base/math.h"
#include "qualifiers.h"

namespace attn {

struct QueryBlock {
  i32 batch, head, head_kv;
  i32 split;        // of the keys
  i32 first, rows;  // query rows
};

// Within a head the last rows come first: under a causal mask they see the most keys, and light blocks fill the end.
template <class C, class P>
FN QueryBlock query_block(i32 block, P const& p, u32 splits) {
  const u32 per_head = base::ceil_div((u32)p.seq_q, (u32)C::block_m), heads = (u32)p.heads_q;
  u32 index = (u32)block;
  QueryBlock b;
  b.split = (i32)(index % splits);
  index /= splits;
  b.first = (i32)(per_head - 1 - index % per_head) * C::block_m;
  index /= per_head;
  b.head = (i32)(index % heads);
  b.batch = (i32)(index / heads);
  b.head_kv = b.head / (i32)((u32)p.heads_q / (u32)p.heads_kv);
  b.rows = base::least(C::block_m, (i32)p.seq_q - b.first);
  return b;
}

struct KeyBlock {
  i32 batch, head_kv;
  i32 first, keys;
};

// The first keys come first: under a causal mask most rows see them. A block has `size` of them.
template <class C, class P>
FN KeyBlock key_block(i32 block, P const& p, i32 size = C::block_n) {
  const u32 per_head = base::ceil_div((u32)p.seq_kv, (u32)size);
  KeyBlock b;
  b.first = (i32)((u32)block % per_head) * size;
  const u32 index = (u32)block / per_head;
  b.head_kv = (i32)(index % (u32)p.heads_kv);
  b.batch = (i32)(index / (u32)p.heads_kv);
  b.keys = base::least(size, (i32)p.seq_kv - b.first);
  return b;
}

}  // namespace attn
