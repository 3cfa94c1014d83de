// Forward attention: out = softmax(scale Q K^T) V and the log of each row's softmax denominator (LSE).
// One block of query rows walks over the tiles of keys (FlashAttention-2's order). Names no architecture: see
// README.md.
#pragma once
#include "attn/layout.h"
#include "attn/mask.h"
#include "attn/schedule.h"
#include "attn/softmax.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Forward {
  static constexpr i32 panels = C::block_m / C::panel;

  struct Panel {
    arch::QueryPanel<C> query;
    arch::Sums<C::panel, C::head_dim_v> out;
    OnlineSoftmax<C> softmax;
  };
  struct Memory {
    arch::KeyTile<C> keys;
    arch::SummedTile<C, C::block_n, C::head_dim_v> values;
    arch::Scores<C> scores;
    Panel panel[panels];
  };

  static METHOD i64 worker_bytes(P const&) { return 0; }
  static METHOD i64 workspace_bytes(P const&) { return 0; }

  static METHOD void run(i64 block, Memory& memory, P const& p) {
    const QueryBlock b = query_block<C>(block, p);
    const Mask<C, P> mask(p);
    const auto q = rows_view(p.q, b.batch, p.q_batch, b.head, p.q_head, b.first, p.q_row, p.q_dim);
    const i32 used = (i32)((b.rows + C::panel - 1) / C::panel);
    for (i32 i = 0; i < used; ++i) {
      Panel& panel = memory.panel[i];
      panel.query.load_rows(q.from(i * C::panel), panel_rows(b, i));
      if (p.scale < 0.0f) panel.query.negate();
    }
    Scaling scaling(p.scale);
    while (add_keys(memory, used, b, mask, scaling, p) && !scaling.early) scaling.early = true;
    for (i32 i = 0; i < used; ++i) finish_panel(memory.panel[i], i, b, p);
  }

 private:
  static METHOD i32 panel_rows(QueryBlock const& b, i32 i) {
    return (i32)base::least<i64>(C::panel, b.rows - i * C::panel);
  }

  // All tiles of keys. Returns whether a score was too large for late scaling.
  static METHOD bool add_keys(Memory& memory, i32 used, QueryBlock const& b, Mask<C, P> const& mask,
                              Scaling const& scaling, P const& p) {
    for (i32 i = 0; i < used; ++i) {
      memory.panel[i].out.clear();
      memory.panel[i].softmax.start();
    }
    const i64 keys_end = mask.keys_end(b.first, b.rows);
    for (i64 key = 0; key < keys_end; key += C::block_n) {
      const i32 keys = (i32)base::least<i64>(C::block_n, keys_end - key);
      const auto k = rows_view(p.k, b.batch, p.k_batch, b.head_kv, p.k_head, key, p.k_row, p.k_dim);
      const auto v = rows_view(p.v, b.batch, p.v_batch, b.head_kv, p.v_head, key, p.v_row, p.v_dim);
      memory.keys.load_rows(k, keys);
      memory.values.load_rows(v, keys);
      const i64 following = base::least<i64>(C::block_n, keys_end - key - keys);
      arch::expect_rows<C::head_dim>(k.from(keys), following);
      arch::expect_rows<C::head_dim_v>(v.from(keys), following);
      for (i32 i = 0; i < used; ++i) add_tile(memory, i, b, mask, key, scaling, p);
    }
    bool coarse = false;
    for (i32 i = 0; i < used; ++i) coarse = coarse || memory.panel[i].softmax.coarse();
    return coarse;
  }

  // One tile of keys, as far as the panel's rows see it.
  static METHOD void add_tile(Memory& memory, i32 i, QueryBlock const& b, Mask<C, P> const& mask, i64 key,
                              Scaling const& scaling, P const& p) {
    Panel& panel = memory.panel[i];
    const i64 first = b.first + i * C::panel;
    const i32 rows = panel_rows(b, i);
    const i64 keys_end = base::least(key + C::block_n, mask.keys_end(first, rows));
    if (keys_end <= key) return;
    const i32 keys = (i32)(keys_end - key);
    arch::PerRow<C, arch::Value> factor;
    if (mask.whole(first, keys_end) && !scaling.early) {
      const auto top = arch::dot_and_top(memory.scores, panel.query, rows, memory.keys, keys);
      factor = panel.softmax.update(memory.scores, top, scaling.of_scores());
    } else {
      arch::dot(memory.scores, panel.query, rows, memory.keys, keys);
      const i32 limit = mask.limit(first, key);
      const float scale = scaling.of_products();
      factor = panel.softmax.update(memory.scores, scaling.of_scores(), [&](auto row, auto column, arch::Value x) {
        return arch::select(column - row <= limit, x * scale, arch::splat(-base::infinity));
      });
    }
    arch::sum_over_keys(panel.out.at, factor, memory.scores, rows, memory.values);
  }

  static METHOD void finish_panel(Panel& panel, i32 i, QueryBlock const& b, P const& p) {
    const i64 first = b.first + i * C::panel;
    const i32 rows = panel_rows(b, i);
    arch::PerRow<C, arch::Value> lse;
    panel.softmax.gather();
    const auto inverse = panel.softmax.finish(lse);
    panel.out.store_rows(rows_view(p.out, b.batch, p.out_batch, b.head, p.out_head, first, p.out_row, 1), rows,
                         inverse);
    arch::store_per_row(p.lse + (b.batch * p.heads_q + b.head) * p.seq_q + first, lse, rows);
  }
};

}  // namespace attn
