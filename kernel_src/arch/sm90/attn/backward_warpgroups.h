// Backward attention on Hopper: one warp has the copy engine bring tiles of query rows, and warpgroups, each with 64
// keys and their dK and dV in registers, work through them. Scores lie with keys as rows, so that weights and gradients
// are left sides of the products for dV and dK as they come. dQ takes the gradients of all warpgroups, through shared
// memory; it is formed one tile later, when they have long been there. See attn/backward.h for the formulas.
#pragma once
#include "accumulate.h"
#include "attn/backward_rows.h"
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

  struct Memory {
    KeyRows keys;
    ValueRows values;
    Stages rows;
    GradientRows gradients[2];
    arch::Turnover keys_turn, gradients_turn[2];
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      memory.keys_turn.init(1);
      memory.rows.init(warps);
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
    m.keys_turn.expect(KeyRows::bytes + ValueRows::bytes);
    m.keys.fetch(p.k_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    m.values.fetch(p.v_map, m.keys_turn.full(), b.first, b.head_kv, b.batch);
    m.rows.bring(tiles, b, p);
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
      const u64 gradients = m.gradients[before.stage].columns_from(by_columns ? 0 : group * 64);
      const u64 all_keys = m.keys.columns_from(by_columns ? group * 64 : 0);
      ptx::wgmma<false, true, true>(E{}, registers(grad_q), gradients, all_keys);
#pragma unroll
      for (i32 step = 1; step < C::block_n / 16; ++step)
        ptx::wgmma<true, true, true>(E{}, registers(grad_q), GradientRows::across(gradients, step),
                                     KeyRows::across(all_keys, step));
      ptx::wgmma_commit();
    };
    const auto add_grad_query = [&] { arch::accumulate(grad_q, Row::grad_query(row_before, p), Row::ld); };

    m.keys_turn.wait_full(0);
#pragma unroll 1
    do {
      auto const& statistics = m.rows.statistics[at.stage];
      Scores weights, gradients;
      arch::Operand<E> weight_words[C::block_m / 16], gradient_words[C::block_m / 16];
      m.rows.query_turn[at.stage].wait_full(at.round);
      ptx::wgmma_fence();
      multiply_along<QueryRows, KeyRows>(weights, keys, m.rows.query[at.stage].rows_from(0));
      m.rows.grad_out_turn[at.stage].wait_full(at.round);
      multiply_along<OutRows, ValueRows>(gradients, values, m.rows.grad_out[at.stage].rows_from(0));
      ptx::wgmma_wait<1>();
      ptx::registers_change(registers(weights));
      if constexpr (!C::grad_query) ptx::sync_warp();  // all lanes have read what they need of the rows before
      if (row_before >= 0 && arch::lane() == 0) m.rows.leave(before_at.stage);
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
      add<OutRows>(grad_v, weight_words, m.rows.grad_out[at.stage].columns_from(), row_before < 0);
      ptx::wgmma_commit();
      add<QueryRows>(grad_k, gradient_words, m.rows.query[at.stage].columns_from(), row_before < 0);
      ptx::wgmma_commit();
      if constexpr (C::grad_query) {
        ptx::wgmma_wait<2>();
        ptx::registers_change(registers(grad_q));
        // The gradients before these have been used by all warpgroups whose present ones are there: two suffice.
        m.gradients[now.stage].template put_operands<Scores>(gradient_words);
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
    if constexpr (C::grad_query) {
      ptx::wgmma_fence();
      multiply_gradients();
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(grad_q));
      add_grad_query();
    }
    finish(m, group, b, grad_k, grad_v, p);
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

  static METHOD void finish(Memory& m, i32 group, KeyBlock const& b, GradKeys& grad_k, GradValues& grad_v, P const& p) {
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
