// Backward attention on Hopper for head dims beyond 128, of which a block of threads holds 64 keys. Of each tile of
// query rows one warpgroup makes weights and the other, from these, gradients; both pass through shared memory. Then
// each forms half of the head dim of dK, dV and dQ. These products run while the weights of the next tile are made. See
// attn/backward.h for the formulas.
#pragma once
#include "accumulate.h"
#include "attn/backward_rows.h"
#include "roles.h"

namespace attn {

template <class C, class P>
struct BackwardWide {
  using E = typename C::Element;
  static constexpr i32 groups = 2, warps = 4 * groups, half = 128;
  static_assert(C::warps == warps + 4 && C::block_n == 64 && C::block_m == 64, "");
  static_assert(C::head_dim <= groups * half && C::head_dim_v <= groups * half, "");
  static constexpr i32 width = groups * half;  // of all rows, so that both halves are whole boxes
  using KeyRows = arch::BoxedRows<E, C::block_n, width>;
  using Stages = RowStages<C, P, width, width>;
  using QueryRows = typename Stages::QueryRows;
  using WeightRows = arch::BoxedRows<E, C::block_n, C::block_m>;

  using Across = arch::WarpgroupsAcross<groups>;
  using Scores = arch::Matrix<arch::EachWarpgroup, C::block_n, C::block_m>;  // or gradients of probabilities
  using Keyed = KeyMajor<Scores>;
  using Sums = arch::Matrix<Across, 64, width>;
  // dQ takes two passes: there are not registers enough for a whole half of the head dim.
  static constexpr i32 quarter = half / 2;
  using GradQueries = arch::Matrix<Across, 64, groups * quarter>;
  using Row = RowData<C, P>;

  struct Memory {
    KeyRows keys, values;
    Stages rows;
    WeightRows weights[2], gradients[2];
    arch::Turnover keys_turn;
    arch::Turnover weights_turn[2];    // weights are there
    arch::Turnover gradients_turn[2];  // gradients are, and products with those before them are done
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      memory.keys_turn.init(1);
      memory.rows.init(warps);
      for (auto& turn : memory.weights_turn) ptx::mbarrier_init(turn.full(), 4);
      for (auto& turn : memory.gradients_turn) ptx::mbarrier_init(turn.full(), warps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    const KeyBlock b = key_block<C>(block, p);
    arch::Roles<groups, C::blocks_per_unit>::split([&] { bring(memory, b, p); },
                                                   [&](i32 group) { compute(memory, group, b, p); });
  }

 private:
  using Tiles = RowTiles<C, P>;

  static METHOD void bring(Memory& m, KeyBlock const& b, P const& p) {
    const Tiles tiles(b, Mask<C, P, i32>(p), p);
    if (!tiles.more()) return;
    m.keys_turn.expect(2 * KeyRows::bytes);
    m.keys.fetch(p.k_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    m.values.fetch(p.v_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    arch::Position<C::stages> at;
    m.rows.bring(tiles, at, b, p);
  }

  static METHOD void compute(Memory& m, i32 group, KeyBlock const& b, P const& p) {
    const Mask<C, P, i32> mask(p);
    const float scale = p.scale * base::log2_e;
    Sums grad_k, grad_v;
    GradQueries grad_q;
    Tiles tiles(b, mask, p);
    if (!tiles.more()) {
      grad_k.clear();
      grad_v.clear();
      return finish(m, group, b, grad_k, grad_v, p);
    }
    arch::Position<C::stages> at, before_at;
    arch::Position<2> now, before{1, 0};  // of weights
    const bool of_weights = group == 0;
    i64 row_before = -1;  // of the tile before; while there is none, products are of nothing and wasted
    i32 added = -1;       // tiles whose products are in the sums
    // Begins to form a quarter of the dQ of the tile before.
    const auto multiply_keys = [&](GradQueries& grad_q, i32 part) {
      const u64 gradients = m.gradients[before.stage].columns_from();
      const u64 keys = m.keys.columns_from(group * half + part * quarter);
      ptx::wgmma<false, true, true>(E{}, registers(grad_q), gradients, keys);
#pragma unroll
      for (i32 step = 1; step < C::block_n / 16; ++step)
        ptx::wgmma<true, true, true>(E{}, registers(grad_q), WeightRows::across(gradients, step),
                                     KeyRows::across(keys, step));
      ptx::wgmma_commit();
    };
    const auto add_grad_query = [&](GradQueries& grad_q, i32 part) {
      ptx::registers_change(registers(grad_q));
      const i32 column = group * half + part * quarter;
      if (row_before < 0 || column >= Row::ld) return;
      arch::accumulate(grad_q, Row::grad_query(row_before, p) + (column - GradQueries::first_column()) * 16, Row::ld);
    };
    // Begins to add the tile before to the sums.
    const auto multiply_weights = [&] {
      if (row_before >= 0) m.gradients_turn[before.stage].wait_full(before.round);
      const u64 weights = m.weights[before.stage].rows_from(0), gradients = m.gradients[before.stage].rows_from(0);
      const u64 grad_out = m.rows.grad_out[before_at.stage].columns_from(group * half);
      const u64 queries = m.rows.query[before_at.stage].columns_from(group * half);
      add(grad_v, weights, grad_out, added > 0);
      add(grad_k, gradients, queries, added > 0);
      ptx::wgmma_commit();
      ++added;
      if constexpr (C::grad_query) multiply_keys(grad_q, 0);
    };
    // Until they are there; the other quarter of dQ is formed while this one is added, in the registers of scores.
    const auto finish_products = [&] {
      GradQueries other;
      if constexpr (C::grad_query) {
        ptx::wgmma_fence();
        multiply_keys(other, 1);
      }
      ptx::wgmma_wait<C::grad_query ? 1 : 0>();
      ptx::registers_change(registers(grad_v));
      ptx::registers_change(registers(grad_k));
      if constexpr (C::grad_query) {
        add_grad_query(grad_q, 0);
        ptx::wgmma_wait<0>();
        add_grad_query(other, 1);
      }
    };

    m.keys_turn.wait_full(0);
#pragma unroll 1
    do {
      auto const& statistics = m.rows.statistics[at.stage];
      Scores scores;
      m.rows.query_turn[at.stage].wait_full(at.round);
      m.rows.grad_out_turn[at.stage].wait_full(at.round);
      ptx::wgmma_fence();
      multiply_along(scores, of_weights ? m.keys : m.values,
                     of_weights ? m.rows.query[at.stage] : m.rows.grad_out[at.stage]);
      multiply_weights();
      ptx::wgmma_wait<C::grad_query ? 2 : 1>();
      ptx::registers_change(registers(scores));
      if (of_weights) {
        Keyed::make_weights(scores, statistics.lse, scale);
        const i32 keys_end = b.first + C::block_n;
        if (!mask.whole(tiles.row, keys_end) || keys_end > p.seq_kv || Keyed::any_coarse_row(statistics.lse))
          Keyed::correct(scores, mask.limit(tiles.row, b.first), b.keys);
        m.weights[now.stage].put(scores, [](i32) { return 1.0f; });
        ptx::fence_proxy_async();
        ptx::sync_warp();
        if (arch::lane() == 0) ptx::mbarrier_arrive(m.weights_turn[now.stage].full());
      } else {
        m.weights_turn[now.stage].wait_full(now.round);
        make_gradients(scores, m.weights[now.stage], statistics.delta);
        m.gradients[now.stage].put(scores, [](i32) { return 1.0f; });
        ptx::fence_proxy_async();
      }
      // Who has come so far is done with the weights of two tiles before, in whose place these are.
      finish_products();
      ptx::sync_warp();
      if (arch::lane() == 0) {
        ptx::mbarrier_arrive(m.gradients_turn[now.stage].full());
        if (row_before >= 0) m.rows.leave(before_at.stage);
      }
      row_before = tiles.data_row(b, p);
      before = now, before_at = at;
      now.next(), at.next(), tiles.next(p);
    } while (tiles.more());
    ptx::wgmma_fence();
    multiply_weights();
    finish_products();
    finish(m, group, b, grad_k, grad_v, p);
  }

  // scores = keys rows^T
  static METHOD void multiply_along(Scores& scores, KeyRows const& of_keys, QueryRows const& of_rows) {
    constexpr i32 steps = base::ceil_div(base::most(C::head_dim, C::head_dim_v), 16);
    const u64 keys = of_keys.rows_from(0), rows = of_rows.rows_from(0);
    ptx::wgmma<false, false>(E{}, registers(scores), keys, rows);
#pragma unroll
    for (i32 step = 1; step < steps; ++step)
      ptx::wgmma<true, false>(E{}, registers(scores), KeyRows::along(keys, step), QueryRows::along(rows, step));
    ptx::wgmma_commit();
  }
  // Gradients of probabilities -> gradients of scores.
  static METHOD void make_gradients(Scores& gradients, WeightRows const& weights, const float* delta) {
    weights.template each_put<Scores>([&](i32 tile, i32 slot, u32 word) {
      const i32 column = Scores::column(tile, 0);
      float (&x)[4] = gradients.at[0][tile];
      x[2 * slot] = arch::element<E>({word}, 0) * (x[2 * slot] - delta[column]);
      x[2 * slot + 1] = arch::element<E>({word}, 1) * (x[2 * slot + 1] - delta[column + 1]);
    });
  }
  // to += weights rows, or at first to = weights rows
  static METHOD void add(Sums& to, u64 weights, u64 rows, bool more) {
#pragma unroll
    for (i32 step = 0; step < C::block_m / 16; ++step)
      ptx::wgmma<true, true>(E{}, registers(to), WeightRows::along(weights, step), QueryRows::across(rows, step),
                             step > 0 || more);
  }

  static METHOD void finish(Memory& m, i32 group, KeyBlock const& b, Sums& grad_k, Sums& grad_v, P const& p) {
    constexpr u32 everyone = 1, own = 2;
    constexpr i32 boxes = half / KeyRows::box_columns;
    ptx::sync_some(everyone, 128 * groups);  // nobody multiplies with keys or values any more
    m.keys.put(grad_k, [&](i32) { return p.scale; });
    m.values.put(grad_v, [](i32) { return 1.0f; });
    ptx::fence_proxy_async();
    ptx::sync_some(own + group, 128);
    if (ptx::thread_index() % 128 == 0) {
      m.keys.template store<boxes>(p.grad_k_map, group * boxes, 0, b.first, b.head_kv, b.batch);
      m.values.template store<boxes>(p.grad_v_map, group * boxes, 0, b.first, b.head_kv, b.batch);
      ptx::tma_stores_commit();
      ptx::tma_stores_wait<0>();
    }
  }

  template <class M>
  static METHOD auto& registers(M& m) {
    return reinterpret_cast<float (&)[M::n_tiles * 4]>(m.at);
  }
};

}  // namespace attn
