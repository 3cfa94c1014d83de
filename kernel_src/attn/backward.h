// Backward attention. With S = scale Q K^T, P = exp(S - LSE), dP = dO V^T and delta = sum(dO * O) - dLSE:
//   dV = P^T dO,  dS = P * (dP - delta),  dK = scale dS^T Q,  dQ = scale dS K   (Dao 2023, algorithm 2).
// One run of keys keeps dK and dV at hand and walks over the query rows; its share of dQ goes to the workspace. Where
// there are several runs, a kernel of its own then sums the shares in a fixed order, so the bits are the same every
// time.
#pragma once
#include "attn/layout.h"
#include "attn/mask.h"
#include "attn/partial.h"
#include "attn/schedule.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Backward {
  using Partial = PartialGradQuery<C, P>;

  struct RowStatistic {
    arch::Value lse, delta;  // the LSE in base 2
  };
  // A panel of query rows in every form that the products take.
  struct Panel {
    arch::QueryPanel<C> query;
    arch::GradOutPanel<C> grad_out;
    arch::SummedTile<C, C::panel, C::head_dim> query_summed;
    arch::SummedTile<C, C::panel, C::head_dim_v> grad_out_summed;
    arch::PerRow<C, RowStatistic> statistics;
  };
  struct Memory {
    arch::KeyTile<C> keys;
    arch::ValueTile<C> values;
    arch::SummedTile<C, C::block_n, C::head_dim> keys_summed;
    arch::Scores<C> weights, gradients;
    arch::Sums<C::block_n, C::head_dim> grad_k;
    arch::Sums<C::block_n, C::head_dim_v> grad_v;
  };

  // Beyond its Memory a worker has, for each query head of a group, the kept panels and (unless shared) dQ.
  static METHOD i64 panels(P const& p) { return (p.seq_q + C::panel - 1) / C::panel; }
  static METHOD i64 head_bytes(P const& p) {
    return panels(p) * arch::Kept<Panel>::bytes + Partial::floats(p) * (i64)sizeof(float);
  }
  static METHOD i64 worker_bytes(P const& p) { return p.heads_q / p.heads_kv * head_bytes(p); }
  static METHOD i64 workspace_bytes(P const& p) { return Partial::shared_bytes(p); }

  static METHOD void run(i64 block, Memory& memory, P const& p) {
    const KeyRange range = key_range<C>(block, p);
    const Mask<C, P> mask(p);
    const i64 group = p.heads_q / p.heads_kv;
    for (i64 i = 0; i < group; ++i) prepare(head_at(memory, range, i, p), range, p);
    for (i64 key = range.first; key < range.end; key += C::block_n) {
      const i32 keys = (i32)base::least<i64>(C::block_n, range.end - key);
      const auto k = rows_view(p.k, range.batch, p.k_batch, range.head_kv, p.k_head, key, p.k_row, p.k_dim);
      const auto v = rows_view(p.v, range.batch, p.v_batch, range.head_kv, p.v_head, key, p.v_row, p.v_dim);
      memory.keys.load_rows(k, keys);
      memory.keys_summed.load_rows(k, keys);
      memory.values.load_rows(v, keys);
      memory.grad_k.clear();
      memory.grad_v.clear();
      for (i64 i = 0; i < group; ++i)
        for (i64 row = mask.rows_begin(key) / C::panel * C::panel; row < p.seq_q; row += C::panel)
          add_panel(memory, head_at(memory, range, i, p), range, row, key, keys, mask, p);
      const i64 b = range.batch, h = range.head_kv;
      memory.grad_k.store_rows(rows_view(p.grad_k, b, p.grad_k_batch, h, p.grad_k_head, key, p.grad_k_row, 1), keys,
                               p.scale);
      memory.grad_v.store_rows(rows_view(p.grad_v, b, p.grad_v_batch, h, p.grad_v_head, key, p.grad_v_row, 1), keys,
                               1.0f);
    }
    if (p.splits > 1) return;
    for (i64 i = 0; i < group; ++i) {
      const Head head = head_at(memory, range, i, p);
      Partial::store(head.grad_q, range.batch, head.index, 0, p.seq_q, p);
    }
  }

 private:
  struct Head {
    i64 index;
    arch::Kept<Panel> panels;
    float* grad_q;
  };

  // Query head i of the group.
  static METHOD Head head_at(Memory& memory, KeyRange const& range, i64 i, P const& p) {
    const i64 index = range.head_kv * (p.heads_q / p.heads_kv) + i;
    char* at = reinterpret_cast<char*>(&memory + 1) + i * head_bytes(p);
    float* own = reinterpret_cast<float*>(at + panels(p) * arch::Kept<Panel>::bytes);
    return {index, arch::Kept<Panel>(at), p.splits == 1 ? own : Partial::shared(p, range.split, range.batch, index)};
  }

  // A cleared dQ, and the panels that every tile of keys meets.
  static METHOD void prepare(Head head, KeyRange const& range, P const& p) {
    arch::clear(head.grad_q, Partial::floats(p));
    for (i64 row = 0; row < p.seq_q; row += C::panel)
      head.panels.keep(row / C::panel, [&](Panel& panel) { load_panel(panel, range.batch, head.index, row, p); });
  }

  static METHOD i32 panel_rows(i64 row, P const& p) { return (i32)base::least<i64>(C::panel, p.seq_q - row); }

  static METHOD void load_panel(Panel& panel, i64 b, i64 head, i64 row, P const& p) {
    const i32 rows = panel_rows(row, p);
    const auto q = rows_view(p.q, b, p.q_batch, head, p.q_head, row, p.q_row, p.q_dim);
    const auto out = rows_view(p.out, b, p.out_batch, head, p.out_head, row, p.out_row, 1);
    const auto grad_out =
        rows_view(p.grad_out, b, p.grad_out_batch, head, p.grad_out_head, row, p.grad_out_row, p.grad_out_dim);
    panel.query.load_rows(q, rows);
    panel.query_summed.load_rows(q, rows);
    panel.grad_out.load_rows(grad_out, rows);
    panel.grad_out_summed.load_rows(grad_out, rows);

    const i64 at = (b * p.heads_q + head) * p.seq_q + row;
    const auto lse = arch::load_per_row<C>(p.lse + at, rows, -base::infinity);
    auto delta = arch::row_products<C, C::head_dim_v>(out, grad_out, rows);
    if (p.grad_lse) {
      const auto grad_lse = arch::load_per_row<C>(p.grad_lse + at, rows, 0.0f);
      for (i32 i = 0; i < delta.slots; ++i) delta.slot[i] -= grad_lse.slot[i];
    }
    for (i32 i = 0; i < lse.slots; ++i) {
      // Rows that saw nothing, and rows beyond the last, have an LSE of -inf: with +inf their probabilities vanish.
      const auto saw_nothing = lse.slot[i] == -base::infinity;
      panel.statistics.slot[i] = {arch::select(saw_nothing, arch::splat(base::infinity), lse.slot[i] * base::log2_e),
                                  delta.slot[i]};
    }
  }

  static METHOD void add_panel(Memory& m, Head head, KeyRange const& range, i64 row, i64 key, i32 tile_keys,
                               Mask<C, P> const& mask, P const& p) {
    const i32 rows = panel_rows(row, p);
    // As far as the rows see, in whole blocks: beyond, the sums over rows would meet scores that no mask was applied
    // to.
    const i64 visible = base::least<i64>(tile_keys, mask.keys_end(row, rows) - key);
    if (visible <= 0) return;
    const i32 keys = base::least(tile_keys, base::round_up((i32)visible, arch::key_block));
    Panel& panel =
        head.panels.get(row / C::panel, [&](Panel& fresh) { load_panel(fresh, range.batch, head.index, row, p); });

    arch::dot(m.weights, panel.query, rows, m.keys, keys);
    arch::dot(m.gradients, panel.grad_out, rows, m.values, keys);
    const float scale = p.scale * base::log2_e;
    // A score's probability. The LSE is rounded, by more than 1 where scores are beyond 2^24: no probability is for
    // that.
    const auto probability = [&](auto& s, arch::Value x) {
      return arch::exp2(arch::min(arch::splat(0.0f), x * scale - s.lse));
    };
    // Scores -> probabilities, and gradients of probabilities -> gradients of scores.
    const auto differentiate = [](auto& s, arch::Value weight, arch::Value& x, arch::Value& gradient) {
      x = weight;
      gradient = weight * (gradient - s.delta);
    };
    if (mask.whole(row, key + keys)) {
      m.weights.each_with(m.gradients, panel.statistics,
                          [&](auto& s, auto, auto, arch::Value& x, arch::Value& gradient) {
                            differentiate(s, probability(s, x), x, gradient);
                          });
    } else {
      const i32 limit = mask.limit(row, key);
      m.weights.each_with(
          m.gradients, panel.statistics, [&](auto& s, auto r, auto c, arch::Value& x, arch::Value& gradient) {
            const arch::Value visible = arch::select(c - r <= limit, probability(s, x), arch::splat(0.0f));
            differentiate(s, visible, x, gradient);
          });
    }
    arch::sum_over_rows(m.grad_v.at, m.weights, rows, panel.grad_out_summed);
    arch::sum_over_rows(m.grad_k.at, m.gradients, rows, panel.query_summed);
    arch::sum_over_keys(head.grad_q + row * Partial::ld, m.gradients, rows, m.keys_summed);
  }
};

}  // namespace attn
