// Backward attention. With S = scale Q K^T, P = exp(S - LSE), dP = dO V^T and delta = sum(dO * O) - dLSE:
//   dV = P^T dO,  dS = P * (dP - delta),  dK = scale dS^T Q,  dQ = scale dS K   (Dao 2023, algorithm 2).
// One run of keys keeps dK and dV at hand and walks over the query rows; its share of dQ goes to the workspace. Where
// there are several runs, a kernel of its own then sums the shares in a fixed order, so the bits are the same every
// time.
#pragma once
#include "attn/layout.h"
#include "attn/mask.h"
#include "attn/reduce.h"
#include "attn/schedule.h"
#include "attn/workspace.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Backward {
  struct RowStatistic {
    arch::Value lse, delta;
  };
  struct Memory {
    arch::KeyTile<C> keys;
    arch::ValueTile<C> values;
    arch::SummedTile<C, C::block_n, C::head_dim> keys_summed;
    arch::QueryPanel<C> query;
    arch::GradOutPanel<C> grad_out;
    arch::SummedTile<C, C::panel, C::head_dim> query_summed;
    arch::SummedTile<C, C::panel, C::head_dim_v> grad_out_summed;
    arch::Scores<C> weights, gradients;
    arch::Sums<C::block_n, C::head_dim> grad_k;
    arch::Sums<C::block_n, C::head_dim_v> grad_v;
  };

  static METHOD void run(i64 block, Memory& memory, P const& p) {
    const KeyRange range = key_range<C>(block, p);
    const Mask<C, P> mask(p);
    const i64 group = p.heads_q / p.heads_kv, head = range.head_kv * group;
    for (i64 h = head; h < head + group; ++h) prepare(range, h, p);
    for (i64 key = range.first; key < range.end; key += C::block_n) {
      const i32 keys = (i32)base::least<i64>(C::block_n, range.end - key);
      const auto k = rows_view(p.k, range.batch, p.k_batch, range.head_kv, p.k_head, key, p.k_row, p.k_dim);
      const auto v = rows_view(p.v, range.batch, p.v_batch, range.head_kv, p.v_head, key, p.v_row, p.v_dim);
      memory.keys.load_rows(k, keys);
      memory.keys_summed.load_rows(k, keys);
      memory.values.load_rows(v, keys);
      memory.grad_k.clear();
      memory.grad_v.clear();
      for (i64 h = head; h < head + group; ++h)
        for (i64 row = mask.rows_begin(key); row < p.seq_q; row += C::panel)
          add_panel(memory, range, h, row, key, keys, mask, p);
      const i64 b = range.batch, h = range.head_kv;
      memory.grad_k.store_rows(rows_view(p.grad_k, b, p.grad_k_batch, h, p.grad_k_head, key, p.grad_k_row, 1), keys,
                               p.scale);
      memory.grad_v.store_rows(rows_view(p.grad_v, b, p.grad_v_batch, h, p.grad_v_head, key, p.grad_v_row, 1), keys,
                               1.0f);
    }
    if (p.splits == 1)
      for (i64 h = head; h < head + group; ++h) reduce_grad_query<C>(range.batch, h, 0, p.seq_q, p);
  }

 private:
  // Row numbers that every tile of keys needs, and a cleared dQ.
  static METHOD void prepare(KeyRange const& range, i64 head, P const& p) {
    const Workspace<C, P> w(p, range.split, range.batch, head);
    const auto out = rows_view(p.out, range.batch, p.out_batch, head, p.out_head, 0, p.out_row, 1);
    const auto grad_out =
        rows_view(p.grad_out, range.batch, p.grad_out_batch, head, p.grad_out_head, 0, p.grad_out_row, p.grad_out_dim);
    const i64 at = (range.batch * p.heads_q + head) * p.seq_q;
    arch::row_products<C::head_dim_v>(w.delta, out, grad_out, p.seq_q);
    for (i64 i = 0; i < p.seq_q; ++i) {
      const float lse = p.lse[at + i];
      w.lse[i] = lse == -base::infinity ? base::infinity : lse * base::log2_e;
      if (p.grad_lse) w.delta[i] -= p.grad_lse[at + i];
    }
    arch::clear(w.grad_q, p.workspace_rows * w.ld);
  }

  static METHOD void add_panel(Memory& m, KeyRange const& range, i64 head, i64 row, i64 key, i32 tile_keys,
                               Mask<C, P> const& mask, P const& p) {
    const i32 rows = (i32)base::least<i64>(C::panel, p.seq_q - row);
    // As far as the rows see, in whole blocks: beyond, the sums over rows would meet scores that no mask was applied
    // to.
    const i64 visible = base::least<i64>(tile_keys, mask.keys_end(row, rows) - key);
    const i32 keys = base::least(tile_keys, base::round_up((i32)visible, arch::key_block));
    const i64 b = range.batch;
    const auto q = rows_view(p.q, b, p.q_batch, head, p.q_head, row, p.q_row, p.q_dim);
    const auto grad_out =
        rows_view(p.grad_out, b, p.grad_out_batch, head, p.grad_out_head, row, p.grad_out_row, p.grad_out_dim);
    m.query.load_rows(q, rows);
    m.query_summed.load_rows(q, rows);
    m.grad_out.load_rows(grad_out, rows);
    m.grad_out_summed.load_rows(grad_out, rows);

    const Workspace<C, P> w(p, range.split, b, head);
    const auto lse = arch::load_per_row<C>(w.lse + row, rows, base::infinity);
    const auto delta = arch::load_per_row<C>(w.delta + row, rows, 0.0f);
    arch::PerRow<C, RowStatistic> statistics;
    for (i32 i = 0; i < statistics.slots; ++i) statistics.slot[i] = {lse.slot[i], delta.slot[i]};

    arch::dot(m.weights, m.query, rows, m.keys, keys);
    arch::dot(m.gradients, m.grad_out, rows, m.values, keys);
    const float scale = p.scale * base::log2_e;
    // Scores -> probabilities, and gradients of probabilities -> gradients of scores.
    const auto differentiate = [&](auto& s, arch::Value probability, arch::Value& x, arch::Value& gradient) {
      x = probability;
      gradient = probability * (gradient - s.delta);
    };
    if (mask.whole(row, key + keys)) {
      m.weights.each_with(m.gradients, statistics, [&](auto& s, auto, auto, arch::Value& x, arch::Value& gradient) {
        differentiate(s, arch::exp2(x * scale - s.lse), x, gradient);
      });
    } else {
      const i32 limit = mask.limit(row, key);
      m.weights.each_with(m.gradients, statistics, [&](auto& s, auto r, auto c, arch::Value& x, arch::Value& gradient) {
        const arch::Value probability = arch::exp2(x * scale - s.lse);
        differentiate(s, arch::select(c - r <= limit, probability, arch::splat(0.0f)), x, gradient);
      });
    }
    arch::sum_over_rows(m.grad_v.at, m.weights, rows, m.grad_out_summed);
    arch::sum_over_rows(m.grad_k.at, m.gradients, rows, m.query_summed);
    arch::sum_over_keys(w.grad_q + row * w.ld, m.gradients, rows, m.keys_summed);
  }
};

}  // namespace attn
