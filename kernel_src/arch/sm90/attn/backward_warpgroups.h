// Backward attention on Hopper: one warp has the copy engine bring tiles of query rows, and warpgroups, each with 64 keys
// and their dK and dV in registers, work through them. Scores lie with keys as rows, so that weights and gradients are
// left sides of the products for dV and dK as they come. dQ takes the gradients of all warpgroups, through shared
// memory; it is formed one tile later, when they have long been there. See attn/backward.h for the formulas.
#pragma once
#include "accumulate.h"
#include "attn/mask.h"
#include "attn/only.h"
#include "attn/probability.h"
#include "attn/schedule.h"
#include "attn/workspace.h"
#include "boxes.h"
#include "ring.h"

namespace attn {

template <class C, class P>
struct BackwardWarpgroups {
  using E = typename C::Element;
  static constexpr i32 warps = C::warps - 4, groups = warps / 4, group_keys = 64;
  static_assert(C::block_n == groups * group_keys, "a warpgroup has 64 keys");
  using KeyRows = arch::BoxedRows<E, C::block_n, C::head_dim>;
  using ValueRows = arch::BoxedRows<E, C::block_n, C::head_dim_v>;
  using QueryRows = arch::BoxedRows<E, C::block_m, C::head_dim>;
  using OutRows = arch::BoxedRows<E, C::block_m, C::head_dim_v>;
  using GradientRows = arch::BoxedRows<E, C::block_n, C::block_m>;

  using Scores = arch::Matrix<arch::Warps<warps, 1>, C::block_n, C::block_m>;
  using GradKeys = arch::Matrix<arch::Warps<warps, 1>, C::block_n, base::round_up(C::head_dim, 16)>;
  using GradValues = arch::Matrix<arch::Warps<warps, 1>, C::block_n, base::round_up(C::head_dim_v, 16)>;
  using Weights = arch::Operand<E>[C::block_m / 16];
  using Row = RowData<C, P>;

  // dQ of 64 rows, which is a warpgroup's part: of a tile of 64 rows each has some columns.
  static constexpr bool shares_rows = C::block_m == 64;
  static_assert(shares_rows || C::block_m == groups * 64, "each warpgroup has rows of dQ, or columns");
  static constexpr i32 part_columns = shares_rows ? 64 : base::round_up(C::head_dim, 16);
  static_assert(!shares_rows || groups * part_columns >= C::head_dim, "");
  struct GradQueries : arch::Matrix<arch::Warps<4, 1>, 64, part_columns> {
    static METHOD i32 group() { return arch::warp() / 4; }
    static METHOD i32 first_row() { return (shares_rows ? 0 : group() * 64) + arch::warp() % 4 * 16; }
    static METHOD i32 first_column() { return shares_rows ? group() * part_columns : 0; }
  };

  struct Rows {
    QueryRows query;
    OutRows grad_out;
  };
  struct Statistics {
    alignas(16) float lse[C::block_m], delta[C::block_m];
  };
  struct Memory {
    KeyRows keys;
    ValueRows values;
    Rows rows[C::stages];
    GradientRows gradients[2];
    Statistics statistics[C::stages];
    arch::Turnover keys_turn, query_turn[C::stages], grad_out_turn[C::stages], gradients_turn[2];
    METHOD void leave_rows(i32 stage) { query_turn[stage].leave(), grad_out_turn[stage].leave(); }
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      memory.keys_turn.init(1);
      for (i32 i = 0; i < C::stages; ++i) {
        memory.query_turn[i].init(warps);
        memory.grad_out_turn[i].init(warps);
      }
      for (auto& turn : memory.gradients_turn) ptx::mbarrier_init(turn.full(), warps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    const i32 group = (i32)ptx::shuffle(ptx::thread_index() / 128, 0);
    const KeyBlock b = key_block<C>(block, p);
    if (group == groups) {
      ptx::setmaxnreg_dec<24>();
      if (ptx::thread_index() == 128 * groups) bring(memory, b, p);
    } else {
      ptx::setmaxnreg_inc<240>();
      compute(memory, group, b, p);
    }
  }

 private:
  // The tiles of query rows that see the keys, of one query head of the group after the other.
  struct Tiles {
    i32 first, row, head, heads_end;
    METHOD Tiles(KeyBlock const& b, Mask<C, P, i32> const& mask, P const& p) {
      const i32 group = (i32)((u32)p.heads_q / (u32)p.heads_kv);
      first = row = mask.rows_begin(b.first) / C::block_m * C::block_m;
      head = b.head_kv * group;
      heads_end = first < (i32)p.seq_q ? head + group : head;
    }
    METHOD bool more() const { return head < heads_end; }
    METHOD void next(P const& p) {
      row += C::block_m;
      if (row >= (i32)p.seq_q) row = first, ++head;
    }
    METHOD i64 data_row(KeyBlock const& b, P const& p) const {
      return Row::row((i64)b.batch * p.heads_q + head, row, p);
    }
  };

  static METHOD void bring(Memory& m, KeyBlock const& b, P const& p) {
    Tiles tiles(b, Mask<C, P, i32>(p), p);
    if (!tiles.more()) return;
    m.keys_turn.expect(KeyRows::bytes + ValueRows::bytes);
    m.keys.fetch(p.k_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    m.values.fetch(p.v_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    constexpr u32 statistics_bytes = 4 * C::block_m;
#pragma unroll 1
    for (arch::Position<C::stages> at; tiles.more(); tiles.next(p), at.next()) {
      Rows& rows = m.rows[at.stage];
      Statistics& statistics = m.statistics[at.stage];
      const i64 row = tiles.data_row(b, p);
      auto &query = m.query_turn[at.stage], &grad_out = m.grad_out_turn[at.stage];
      query.wait_free(at.round);
      query.expect(QueryRows::bytes + statistics_bytes);
      rows.query.fetch(p.q_map, query.full(), tiles.row, tiles.head, b.batch);
      ptx::bulk_load(ptx::shared_address(statistics.lse), Row::lse(row, p), statistics_bytes, query.full());
      grad_out.wait_free(at.round);
      grad_out.expect(OutRows::bytes + statistics_bytes);
      rows.grad_out.fetch(p.grad_out_map, grad_out.full(), tiles.row, tiles.head, b.batch);
      ptx::bulk_load(ptx::shared_address(statistics.delta), Row::delta(row, p), statistics_bytes, grad_out.full());
    }
  }

  static METHOD void compute(Memory& m, i32 group, KeyBlock const& b, P const& p) {
    const Mask<C, P, i32> mask(p);
    const float scale = p.scale * base::log2_e;
    GradKeys grad_k;
    GradValues grad_v;
    GradQueries grad_q;
    Tiles tiles(b, mask, p);
    if (!tiles.more()) {
      grad_k.clear();
      grad_v.clear();
      return finish(m, group, b, grad_k, grad_v, p);
    }
    const u64 keys = m.keys.rows_from(group * group_keys), values = m.values.rows_from(group * group_keys);
    arch::Position<C::stages> at, before_at;
    arch::Position<2> now, before{1, 0};  // of gradients
    i64 row_before = -1;                  // of the tile whose dQ is to be formed
    // Begins to form the dQ of the tile before; of the first, which has none before it, something that nobody takes.
    const auto multiply_gradients = [&] {
      if (row_before >= 0) m.gradients_turn[before.stage].wait_full(before.round);
      const u64 gradients = m.gradients[before.stage].columns_from(shares_rows ? 0 : group * 64);
      const u64 all_keys = m.keys.columns_from(shares_rows ? group * part_columns : 0);
      constexpr i32 steps = C::block_n / 16;
      multiply_across<false>(grad_q, GradientRows::across(gradients, 0), KeyRows::across(all_keys, 0));
#pragma unroll
      for (i32 step = 1; step < steps; ++step)
        multiply_across<true>(grad_q, GradientRows::across(gradients, step), KeyRows::across(all_keys, step));
      ptx::wgmma_commit();
    };
    const auto add_grad_query = [&] { arch::accumulate(grad_q, Row::grad_query(row_before, p), Row::ld); };

    m.keys_turn.wait_full(0);
#pragma unroll 1
    do {
      Rows& rows = m.rows[at.stage];
      Statistics const& statistics = m.statistics[at.stage];
      Scores weights, gradients;
      Weights weight_words, gradient_words;
      m.query_turn[at.stage].wait_full(at.round);
      ptx::wgmma_fence();
      multiply_along<QueryRows, KeyRows>(weights, keys, rows.query.rows_from(0));
      m.grad_out_turn[at.stage].wait_full(at.round);
      multiply_along<OutRows, ValueRows>(gradients, values, rows.grad_out.rows_from(0));
      ptx::wgmma_wait<1>();
      ptx::registers_change(registers(weights));
      if (row_before >= 0 && arch::lane() == 0) m.leave_rows(before_at.stage);
      make_weights(weights, statistics.lse, scale);
      const i32 keys_end = b.first + C::block_n;
      if (!mask.whole(tiles.row, keys_end) || keys_end > p.seq_kv || any_coarse_row(statistics.lse))
        hide(weights, mask.limit(tiles.row, b.first), b.keys);
      pack(weight_words, weights);
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(gradients));
      make_gradients(gradients, weights, statistics.delta);
      pack(gradient_words, gradients);
      ptx::wgmma_fence();
      if constexpr (C::grad_query) multiply_gradients();
      add<OutRows>(grad_v, weight_words, rows.grad_out.columns_from(), row_before < 0);
      ptx::wgmma_commit();
      add<QueryRows>(grad_k, gradient_words, rows.query.columns_from(), row_before < 0);
      ptx::wgmma_commit();
      if constexpr (C::grad_query) {
        ptx::wgmma_wait<2>();
        ptx::registers_change(registers(grad_q));
        // The gradients before these have been used by all warpgroups whose present ones are there: two suffice.
        m.gradients[now.stage].put(gradient_words, Scores::first_row());
        ptx::fence_proxy_async();
        ptx::sync_warp();
        if (arch::lane() == 0) ptx::mbarrier_arrive(m.gradients_turn[now.stage].full());
        if (row_before >= 0) add_grad_query();
        before = now;
        now.next();
      }
      ptx::wgmma_wait<C::keys_behind ? 1 : 0>();  // with registers enough dK is formed while the next scores are
      row_before = tiles.data_row(b, p);
      before_at = at;
      tiles.next(p), at.next();
    } while (tiles.more());
    ptx::wgmma_wait<0>();
    ptx::registers_change(registers(grad_k));
    ptx::registers_change(registers(grad_v));
    if (C::grad_query && row_before >= 0) {
      ptx::wgmma_fence();
      multiply_gradients();
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(grad_q));
      add_grad_query();
    }
    finish(m, group, b, grad_k, grad_v, p);
  }

  static METHOD void make_weights(Scores& weights, const float* lse, float scale) {
#pragma unroll
    for (i32 j = 0; j < Scores::n_tiles; ++j) {
      const Pair of = pair(lse, j);
      float(&x)[4] = weights.at[0][j];
      x[0] = arch::exp2(x[0] * scale - of.first), x[1] = arch::exp2(x[1] * scale - of.second);
      x[2] = arch::exp2(x[2] * scale - of.first), x[3] = arch::exp2(x[3] * scale - of.second);
    }
  }
  static METHOD void make_gradients(Scores& gradients, Scores const& weights, const float* delta) {
#pragma unroll
    for (i32 j = 0; j < Scores::n_tiles; ++j) {
      const Pair of = pair(delta, j);
      float(&x)[4] = gradients.at[0][j];
      const float(&weight)[4] = weights.at[0][j];
      x[0] = weight[0] * (x[0] - of.first), x[1] = weight[1] * (x[1] - of.second);
      x[2] = weight[2] * (x[2] - of.first), x[3] = weight[3] * (x[3] - of.second);
    }
  }
  static METHOD void hide(Scores& weights, i32 limit, i32 keys) {
    // Of each key the first query row that sees it, counted from this lane's first.
    const i32 own = Scores::column(0, 0);
    i32 begin[2];
#pragma unroll
    for (i32 slot = 0; slot < 2; ++slot) {
      const i32 key = Scores::row(0, 2 * slot);
      begin[slot] = key < keys ? key - limit - own : 1 << 30;
    }
    weights.each_slot([&](i32 slot, i32, i32 column, float& x) { x = corrected(x, column - own < begin[slot]); });
  }
  // What belongs to this lane's columns of a tile.
  struct alignas(8) Pair {
    float first, second;
  };
  static METHOD Pair pair(const float* from, i32 tile) {
    return *reinterpret_cast<const Pair*>(from + Scores::column(tile, 0));
  }
  static METHOD bool any_coarse_row(const float* lse) {
    float own[C::block_m / 32];
#pragma unroll
    for (i32 i = 0; i < C::block_m / 32; ++i) own[i] = lse[i * 32 + arch::lane()];
    return ptx::any(any_coarse(own));
  }
  static METHOD void pack(Weights& to, Scores const& from) {
#pragma unroll
    for (i32 step = 0; step < C::block_m / 16; ++step) to[step] = from.template left<E>(0, step);
  }

  // scores = keys rows^T
  template <class RowsOfQueries, class RowsOfKeys>
  static METHOD void multiply_along(Scores& scores, u64 keys, u64 queries) {
    ptx::wgmma<false, false>(E{}, registers(scores), RowsOfKeys::along(keys, 0), RowsOfQueries::along(queries, 0));
#pragma unroll
    for (i32 step = 1; step < RowsOfQueries::steps; ++step)
      ptx::wgmma<true, false>(E{}, registers(scores), RowsOfKeys::along(keys, step),
                              RowsOfQueries::along(queries, step));
    ptx::wgmma_commit();
  }
  template <bool add>
  static METHOD void multiply_across(GradQueries& to, u64 gradients, u64 keys) {
    ptx::wgmma<add, true, true>(E{}, registers(to), gradients, keys);
  }
  // to += weights rows, or at first to = weights rows
  template <class RowsOfQueries, class M>
  static METHOD void add(M& to, Weights const& weights, u64 queries, bool first) {
#pragma unroll
    for (i32 step = 0; step < C::block_m / 16; ++step)
      ptx::wgmma<true, true>(E{}, registers(to), weights[step].word, RowsOfQueries::across(queries, step),
                             step > 0 || !first);
  }

  static METHOD void finish(Memory& m, i32 group, KeyBlock const& b, GradKeys& grad_k, GradValues& grad_v,
                            P const& p) {
    constexpr u32 everyone = 1, own = 2;
    ptx::sync_some(everyone, 128 * groups);  // nobody multiplies with keys or values any more
    m.keys.put(grad_k, [&](i32) { return p.scale; });
    m.values.put(grad_v, [](i32) { return 1.0f; });
    ptx::fence_proxy_async();
    ptx::sync_some(own + group, 128);
    if (ptx::thread_index() % 128 == 0) {
      const i32 key = group * group_keys;
      m.keys.store(p.grad_k_map, key, b.first + key, b.head_kv, b.batch);
      m.values.store(p.grad_v_map, key, b.first + key, b.head_kv, b.batch);
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
