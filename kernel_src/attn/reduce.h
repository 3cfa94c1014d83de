// dQ from its partial sums, added in the order of the splits: the bits are the same every time.
#pragma once
#include "attn/partial.h"
#include "attn/schedule.h"

namespace attn {

template <class C, class P>
struct ReduceGradQuery {
  using Partial = PartialGradQuery<C, P>;
  struct Memory {};

  static METHOD i64 worker_bytes(P const&) { return 0; }
  static METHOD i64 workspace_bytes(P const& p) { return Partial::shared_bytes(p); }

  static METHOD void run(i64 block, Memory&, P const& p) {
    const QueryBlock b = query_block<C>(block, p);
    const i64 at = b.first * Partial::ld;
    float* sum = Partial::shared(p, 0, b.batch, b.head);
    for (i64 split = 1; split < p.splits; ++split)
      arch::add(sum + at, Partial::shared(p, split, b.batch, b.head) + at, b.rows * Partial::ld);
    Partial::store(sum, b.batch, b.head, b.first, b.rows, p);
  }
};

}  // namespace attn
