// Backward attention on Hopper: one warp has the copy engine bring tiles of query rows, and warpgroups, each with 64
// keys and their dK and dV in registers, work through them. Scores lie with keys as rows, so that weights and gradients
// are left sides of the products for dV and dK as they come. See attn/backward.h for the formulas.
#pragma once
#include "attn/backward_rows.h"
#include "attn/gathered_grad_query.h"
#include "roles.h"

namespace attn {

template <class C, class P>
struct BackwardWarpgroups {
  using E = typename C::Element;
  static constexpr i32 warps = C::warps - 4, groups = warps / 4, group_keys = 64;
  static_assert(C::block_n == groups * group_keys, "a warpgroup has 64 keys");
  using KeyRows = arch::BoxedRows<E, C::block_n, C::head_dim>;
  using ValueRows = arch::BoxedRows<E, C::block_n, C::head_dim_v>;
  using Stages = RowStages<C, P, C::head_dim, C::head_dim_v>;
  using QueryRows = typename Stages::QueryRows;
  using OutRows = typename Stages::OutRows;

  using Down = arch::Warps<warps, 1>;
  using Scores = arch::Matrix<Down, C::block_n, C::block_m>;
  using Keyed = KeyMajor<Scores>;
  using GradKeys = arch::Matrix<Down, C::block_n, base::round_up(C::head_dim, 16)>;
  using GradValues = arch::Matrix<Down, C::block_n, base::round_up(C::head_dim_v, 16)>;
  // Where a tile has 64 rows warpgroups share the columns of dQ.
  using Cluster = arch::Cluster<C::cluster>;
  using GradQuery = GatheredGradQuery<C, P, groups, C::block_m == 64 ? groups : 1>;

  // With two the next keys and values come while dK and dV of the present ones are stored.
  static constexpr i32 key_stages = C::key_stages;
  struct Memory {
    KeyRows keys[key_stages];
    ValueRows values[key_stages];
    Stages rows;
    typename GradQuery::Memory grad_query;
    typename GradQuery::Turns grad_query_turns;
    arch::Turnover keys_turn[key_stages];
  };

  static METHOD void run(i32, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      for (auto& turn : memory.keys_turn) turn.init(groups);
      memory.rows.init(128 * groups);
      memory.grad_query_turns.init(128 * groups);
      ptx::fence_mbarrier_init();
    }
    const u32 rank = Cluster::begin();
    arch::Roles<groups, C::blocks_per_unit>::split(
        [&] { bring(memory, rank, p); },
        [&](i32 helper) { GradQuery::help(helper, memory.grad_query, memory.grad_query_turns, rank, p); },
        [&](i32 group) { compute(memory, group, rank, p); });
    Cluster::end();
  }

 private:
  using Tiles = RowTiles<C, P>;

  static METHOD void bring(Memory& m, u32 rank, P const& p) {
    const Mask<C, P, i32> mask(p);
    arch::Position<C::stages> at;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) {
      const KeyBlock both = work.block(), b = GradQuery::of_block_in(both, rank);
      const auto of_keys = arch::position<key_stages>(work.done);
      auto& turn = m.keys_turn[of_keys.stage];
      turn.wait_free(of_keys.round);
      turn.expect(KeyRows::bytes + ValueRows::bytes + GradQuery::far_bytes);
      m.keys[of_keys.stage].fetch(p.k_map, turn.full(), b.first, b.head_kv, b.batch);
      m.values[of_keys.stage].fetch(p.v_map, turn.full(), b.first, b.head_kv, b.batch);
      GradQuery::fetch_far_keys(m.grad_query, of_keys.stage, turn.full(), both, rank, p);
      m.rows.bring(Tiles(both, mask, p), at, b, p);
    }
  }

  static METHOD void compute(Memory& m, i32 group, u32 rank, P const& p) {
    u32 tiles_done = 0;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) differentiate(m, group, rank, work, tiles_done, p);
  }

  static METHOD void differentiate(Memory& m, i32 group, u32 rank, KeyBlocks<C, P> const& work, u32& tiles_done,
                                   P const& p) {
    const KeyBlock both = work.block(), b = GradQuery::of_block_in(both, rank);
    const Mask<C, P, i32> mask(p);
    const float scale = p.scale * base::log2_e;
    GradKeys grad_k;
    GradValues grad_v;
    GradQuery grad_q(m.grad_query, m.grad_query_turns, group, rank);
    Tiles tiles(both, mask, p);
    const auto of_keys = arch::position<key_stages>(work.done);
    KeyRows& key_rows = m.keys[of_keys.stage];
    m.keys_turn[of_keys.stage].wait_full(of_keys.round);
    if (!tiles.more()) {
      grad_k.clear();
      grad_v.clear();
      return finish(m, of_keys.stage, group, b, grad_k, grad_v, p);
    }
    const u64 keys = key_rows.rows_from(group * group_keys);
    const u64 values = m.values[of_keys.stage].rows_from(group * group_keys);
    grad_q.begin_keys(key_rows, of_keys.stage);
    bool first = true;
    const auto leave_rows_before = [&] { m.rows.leave(arch::position<C::stages>(tiles_done - 1).stage); };

#pragma unroll 1
    do {
      const auto at = arch::position<C::stages>(tiles_done);
      const i32 stage = at.stage;
      auto const& statistics = m.rows.statistics[stage];
      Scores weights, gradients;
      arch::Operand<E> weight_words[C::block_m / 16], gradient_words[C::block_m / 16];
      m.rows.query_turn[stage].wait_full(at.round);
      ptx::wgmma_fence();
      multiply_along<QueryRows, KeyRows>(weights, keys, m.rows.query[stage].rows_from(0));
      m.rows.grad_out_turn[stage].wait_full(at.round);
      multiply_along<OutRows, ValueRows>(gradients, values, m.rows.grad_out[stage].rows_from(0));
      ptx::wgmma_wait<1>();
      ptx::registers_change(registers(weights));
      if (!first) leave_rows_before();
      Keyed::make_weights(weights, statistics.lse, scale);
      const i32 keys_end = b.first + C::block_n;
      if (!mask.whole(tiles.row, keys_end) || keys_end > p.seq_kv || Keyed::any_coarse_row(statistics.lse))
        Keyed::correct(weights, mask.limit(tiles.row, b.first), b.keys);
      Keyed::pack(weight_words, weights);
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(gradients));
      Keyed::make_gradients(gradients, weights, statistics.delta);
      Keyed::pack(gradient_words, gradients);
      ptx::wgmma_fence();
      grad_q.multiply();
      add<OutRows>(grad_v, weight_words, m.rows.grad_out[stage].columns_from(), first);
      ptx::wgmma_commit();
      add<QueryRows>(grad_k, gradient_words, m.rows.query[stage].columns_from(), first);
      ptx::wgmma_commit();
      ptx::wgmma_wait<2>();
      const auto now = arch::position<2>(tiles_done);
      m.grad_query_turns.wait_free(now);
      m.grad_query.gradients[now.stage].template put_operands<Scores>(gradient_words);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(m.grad_query_turns.own[now.stage].full());
      grad_q.deliver(p);
      ptx::wgmma_wait<C::keys_behind ? 1 : 0>();  // with registers enough dK is formed while the next scores are
      grad_q.next(tiles, b, now, p);
      tiles.next(p), ++tiles_done;
      first = false;
    } while (tiles.more());
    ptx::wgmma_wait<0>();
    ptx::registers_change(registers(grad_k));
    ptx::registers_change(registers(grad_v));
    leave_rows_before();
    grad_q.finish_keys(p);
    finish(m, of_keys.stage, group, b, grad_k, grad_v, p);
  }

  // scores = keys rows^T
  template <class RowsOfQueries, class RowsOfKeys>
  static METHOD void multiply_along(Scores& scores, u64 keys, u64 queries) {
    ptx::wgmma<false, false>(E{}, registers(scores), keys, queries);
#pragma unroll
    for (i32 step = 1; step < RowsOfQueries::steps; ++step)
      ptx::wgmma<true, false>(E{}, registers(scores), RowsOfKeys::along(keys, step),
                              RowsOfQueries::along(queries, step));
    ptx::wgmma_commit();
  }
  // to += weights rows, or at first to = weights rows
  template <class RowsOfQueries, class M>
  static METHOD void add(M& to, const arch::Operand<E> (&weights)[C::block_m / 16], u64 queries, bool first) {
#pragma unroll
    for (i32 step = 0; step < C::block_m / 16; ++step)
      ptx::wgmma<true, true>(E{}, registers(to), weights[step].word, RowsOfQueries::across(queries, step),
                             step > 0 || !first);
  }

  static METHOD void finish(Memory& m, i32 stage, i32 group, KeyBlock const& b, GradKeys& grad_k, GradValues& grad_v,
                            P const& p) {
    constexpr u32 everyone = 1, own = 2;
    KeyRows& keys = m.keys[stage];
    ValueRows& values = m.values[stage];
    ptx::sync_some(everyone, 128 * groups);  // nobody multiplies with these keys and values any more
    keys.put(grad_k, [&](i32) { return p.scale; });
    values.put(grad_v, [](i32) { return 1.0f; });
    ptx::fence_proxy_async();
    ptx::sync_some(own + group, 128);
    if (ptx::thread_index() % 128 == 0) {
      const i32 key = group * group_keys;
      keys.store(p.grad_k_map, key, b.first + key, b.head_kv, b.batch);
      values.store(p.grad_v_map, key, b.first + key, b.head_kv, b.batch);
      ptx::tma_stores_commit();
      ptx::tma_stores_wait<0>();
      m.keys_turn[stage].leave();
    }
  }

  template <class M>
  static METHOD auto& registers(M& m) {
    return reinterpret_cast<float (&)[M::n_tiles * 4]>(m.at);
  }
};

}  // namespace attn
