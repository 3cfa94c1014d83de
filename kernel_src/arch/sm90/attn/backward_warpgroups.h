// Backward attention on Hopper: one warp has the copy engine bring tiles of query rows, and warpgroups, each with 64
// keys and their dK and dV in registers, work through them. Scores lie with keys as rows, so that weights and gradients
// are left sides of the products for dV and dK as they come. dQ takes the gradients of all warpgroups, through shared
// memory; it is formed one tile later, when they have long been there. See attn/backward.h for the formulas.
#pragma once
#include "accumulate.h"
#include "attn/backward_rows.h"
#include "attn/tiles.h"
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
  using GradientRows = arch::BoxedRows<E, C::block_n, C::block_m>;

  using Down = arch::Warps<warps, 1>;
  using Scores = arch::Matrix<Down, C::block_n, C::block_m>;
  using Keyed = KeyMajor<Scores>;
  using GradKeys = arch::Matrix<Down, C::block_n, base::round_up(C::head_dim, 16)>;
  using GradValues = arch::Matrix<Down, C::block_n, base::round_up(C::head_dim_v, 16)>;
  // Of dQ a warpgroup forms 64 rows, or where a tile has no more, 64 of their columns.
  static constexpr bool by_columns = C::block_m == 64;
  using GradQueries = typename arch::Either<by_columns, arch::Matrix<arch::WarpgroupsAcross<groups>, 64, groups * 64>,
                                            arch::Matrix<Down, C::block_m, base::round_up(C::head_dim, 16)>>::Type;
  static_assert(by_columns ? GradQueries::columns == base::round_up(C::head_dim, 64) : C::block_m == groups * 64, "");
  using Row = RowData<C, P>;

  static constexpr i32 key_stages = 2;  // the next keys and values come while dK and dV of the present ones are stored
  struct Memory {
    KeyRows keys[key_stages];
    ValueRows values[key_stages];
    Stages rows;
    GradientRows gradients[2];
    arch::Turnover keys_turn[key_stages], gradients_turn[2];
  };

  static METHOD void run(i32, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      for (auto& turn : memory.keys_turn) turn.init(groups);
      memory.rows.init(warps);
      for (auto& turn : memory.gradients_turn) ptx::mbarrier_init(turn.full(), warps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    arch::Roles<groups, C::blocks_per_unit>::split([&] { bring(memory, p); },
                                                   [&](i32 group) { compute(memory, group, p); });
  }

 private:
  using Tiles = RowTiles<C, P>;

  static METHOD void bring(Memory& m, P const& p) {
    const Mask<C, P, i32> mask(p);
    arch::Position<C::stages> at;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) {
      const KeyBlock b = work.block();
      const auto of_keys = arch::position<key_stages>(work.done);
      auto& turn = m.keys_turn[of_keys.stage];
      turn.wait_free(of_keys.round);
      turn.expect(KeyRows::bytes + ValueRows::bytes);
      m.keys[of_keys.stage].fetch(p.k_map, turn.full(), b.first, b.head_kv, b.batch);
      m.values[of_keys.stage].fetch(p.v_map, turn.full(), b.first, b.head_kv, b.batch);
      m.rows.bring(Tiles(b, mask, p), at, b, p);
    }
  }

  static METHOD void compute(Memory& m, i32 group, P const& p) {
    u32 tiles_done = 0;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) differentiate(m, group, work, tiles_done, p);
  }

  static METHOD void differentiate(Memory& m, i32 group, KeyBlocks<C, P> const& work, u32& tiles_done, P const& p) {
    const KeyBlock b = work.block();
    const Mask<C, P, i32> mask(p);
    const float scale = p.scale * base::log2_e;
    GradKeys grad_k;
    GradValues grad_v;
    GradQueries grad_q;
    Tiles tiles(b, mask, p);
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
    i64 row_before = -1;  // of the tile whose dQ is to be formed
    // Begins to form the dQ of the tile before; of the first, which has none before it, something that nobody takes.
    const auto multiply_gradients = [&] {
      const auto before = arch::position<2>(tiles_done - 1);
      if (row_before >= 0) m.gradients_turn[before.stage].wait_full(before.round);
      const u64 gradients = m.gradients[before.stage].columns_from(by_columns ? 0 : group * 64);
      const u64 all_keys = key_rows.columns_from(by_columns ? group * 64 : 0);
      ptx::wgmma<false, true, true>(E{}, registers(grad_q), gradients, all_keys);
#pragma unroll
      for (i32 step = 1; step < C::block_n / 16; ++step)
        ptx::wgmma<true, true, true>(E{}, registers(grad_q), GradientRows::across(gradients, step),
                                     KeyRows::across(all_keys, step));
      ptx::wgmma_commit();
    };
    const auto leave_rows_before = [&] { m.rows.leave(arch::position<C::stages>(tiles_done - 1).stage); };
    const auto add_grad_query = [&] { arch::accumulate(grad_q, Row::grad_query(row_before, p), Row::ld); };

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
      if constexpr (!C::grad_query) ptx::sync_warp();  // all lanes have read what they need of the rows before
      if (row_before >= 0 && arch::lane() == 0) leave_rows_before();
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
      if constexpr (C::grad_query) multiply_gradients();
      add<OutRows>(grad_v, weight_words, m.rows.grad_out[stage].columns_from(), row_before < 0);
      ptx::wgmma_commit();
      add<QueryRows>(grad_k, gradient_words, m.rows.query[stage].columns_from(), row_before < 0);
      ptx::wgmma_commit();
      if constexpr (C::grad_query) {
        ptx::wgmma_wait<2>();
        ptx::registers_change(registers(grad_q));
        // The gradients before these have been used by all warpgroups whose present ones are there: two suffice.
        const i32 now = tiles_done % 2;
        m.gradients[now].template put_operands<Scores>(gradient_words);
        ptx::fence_proxy_async();
        ptx::sync_warp();
        if (arch::lane() == 0) ptx::mbarrier_arrive(m.gradients_turn[now].full());
        if (row_before >= 0) add_grad_query();
      }
      ptx::wgmma_wait<C::keys_behind ? 1 : 0>();  // with registers enough dK is formed while the next scores are
      row_before = tiles.data_row(b, p);
      tiles.next(p), ++tiles_done;
    } while (tiles.more());
    ptx::wgmma_wait<0>();
    ptx::registers_change(registers(grad_k));
    ptx::registers_change(registers(grad_v));
    ptx::sync_warp();
    if (arch::lane() == 0) leave_rows_before();
    if constexpr (C::grad_query) {
      ptx::wgmma_fence();
      multiply_gradients();
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(grad_q));
      add_grad_query();
    }
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
