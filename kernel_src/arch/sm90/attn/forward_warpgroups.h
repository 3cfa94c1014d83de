// Forward attention on Hopper: one warp has the copy engine bring queries, keys and values, and the warpgroups that
// compute find them in shared memory. A warpgroup has the tensor cores form the next scores and the present sums while
// it turns scores into weights (FlashAttention-3's order, Shah et al. 2024). See attn/forward.h for the formulas.
#pragma once
#include "attn/mask.h"
#include "attn/softmax.h"
#include "attn/tiles.h"
#include "boxes.h"
#include "ring.h"
#include "roles.h"
#include "store.h"

namespace attn {

template <class C, class P>
struct ForwardWarpgroups {
  using E = typename C::Element;
  struct Computing : C {
    static constexpr i32 warps = C::warps - 4, across = 1;
  };
  static constexpr i32 groups = Computing::warps / 4, group_rows = C::block_m / groups;
  static_assert(group_rows == 64, "a warpgroup multiplies 64 rows");
  using QueryRows = arch::BoxedRows<E, C::block_m, C::head_dim>;
  using KeyRows = arch::BoxedRows<E, C::block_n, C::head_dim>;
  using ValueRows = arch::BoxedRows<E, C::block_n, C::head_dim_v>;
  using Scores = arch::Scores<Computing>;
  using Sums = arch::Matrix<arch::Warps<Computing::warps, 1>, C::block_m, base::round_up(C::head_dim_v, 16)>;
  using PerRow = arch::PerRow<Computing, float>;
  using Softmax = OnlineSoftmax<Computing>;
  // Where two blocks' queries fit, outputs leave from the place of the queries that they belong to.
  static constexpr bool out_in_query = C::query_stages > 1 && C::head_dim_v <= C::head_dim;

  struct Memory {
    QueryRows query[C::query_stages];
    KeyRows keys[C::stages];
    ValueRows values[C::stages];
    arch::Turnover query_turn[C::query_stages], keys_turn[C::stages], values_turn[C::stages];
  };

  static METHOD void run(i32, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      for (auto& turn : memory.query_turn) turn.init(out_in_query ? groups : Computing::warps);
      for (auto& turn : memory.keys_turn) turn.init(Computing::warps);
      for (auto& turn : memory.values_turn) turn.init(Computing::warps);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    arch::Roles<groups, C::blocks_per_unit>::split([&] { bring(memory, p); },
                                                   [&](i32 group) { compute(memory, group, p); });
  }

 private:
  // Tiles of keys that rows of the block see. They are taken from the last to the first. Rows that see nothing take
  // one.
  static METHOD i32 key_tiles(QueryBlock const& b, Mask<C, P, i32> const& mask) {
    return base::most(1, base::ceil_div(mask.keys_end(b.first, b.rows), C::block_n));
  }

  static METHOD void bring(Memory& m, P const& p) {
    const Mask<C, P, i32> mask(p);
    arch::Position<C::query_stages> query;
    arch::Position<C::stages> at;
#pragma unroll 1
    for (Tiles<C, P> work(p); work.more(); work.next(), query.next()) {
      const QueryBlock b = work.tile();
      const auto bring_keys = [&](i32 tile, arch::Position<C::stages> at) {
        auto& turn = m.keys_turn[at.stage];
        turn.wait_free(at.round);
        turn.expect(KeyRows::bytes);
        m.keys[at.stage].fetch(p.k_map, turn.full(), tile * C::block_n, b.head_kv, b.batch);
      };
      const auto bring_values = [&](i32 tile, arch::Position<C::stages> at) {
        auto& turn = m.values_turn[at.stage];
        turn.wait_free(at.round);
        turn.expect(ValueRows::bytes);
        m.values[at.stage].fetch(p.v_map, turn.full(), tile * C::block_n, b.head_kv, b.batch);
      };
      auto& turn = m.query_turn[query.stage];
      turn.wait_free(query.round);
      turn.expect(QueryRows::bytes);
      m.query[query.stage].fetch(p.q_map, turn.full(), b.first, b.head, b.batch);
      const i32 tiles = key_tiles(b, mask);
      bring_keys(tiles - 1, at);
#pragma unroll 1
      for (i32 tile = tiles - 1; tile >= 0; --tile) {
        const auto of_values = at;
        at.next();
        if (tile > 0) bring_keys(tile - 1, at);
        bring_values(tile, of_values);
      }
    }
  }

  static METHOD void compute(Memory& m, i32 group, P const& p) {
    const Mask<C, P, i32> mask(p);
    const Scaling scaling(p.scale);
    arch::Position<C::query_stages> query;
    arch::Position<C::stages> at;
    Scores scores;
    arch::Operand<E> weights[C::block_n / 16];
    Sums sums;
    Softmax softmax;
    const auto multiply_keys = [&] {
      const u64 rows = m.query[query.stage].rows_from(group * group_rows), keys = m.keys[at.stage].rows_from(0);
      multiply<false>(scores, rows, keys, 0);
#pragma unroll
      for (i32 step = 1; step < KeyRows::steps; ++step) multiply<true>(scores, rows, keys, step);
      ptx::wgmma_commit();
    };
    const auto add_values = [&](arch::Position<C::stages> at) {
      m.values_turn[at.stage].wait_full(at.round);
      const u64 values = m.values[at.stage].columns_from();
#pragma unroll
      for (i32 step = 0; step < C::block_n / 16; ++step)
        ptx::wgmma<true, true>(E{}, registers(sums), weights[step].word, ValueRows::across(values, step));
      ptx::wgmma_commit();
    };
    const auto scores_are_there = [&] {
      ptx::registers_change(registers(scores));
      if (arch::lane() == 0) m.keys_turn[at.stage].leave();
    };
    const auto sums_are_there = [&](arch::Position<C::stages> at) {
      ptx::registers_change(registers(sums));
      if (arch::lane() == 0) m.values_turn[at.stage].leave();
    };
    // Scores -> weights; what sums so far must be multiplied by.
    const auto weigh = [&](i32 first_row, i32 key) {
      if (key + C::block_n > mask.seq_kv || !mask.whole(first_row + group * group_rows, key + C::block_n))
        hide(scores, mask.limit(first_row, key), mask.seq_kv - key);
      const auto best = softmax.look(scores);
      const PerRow factor = softmax.raise(best, scaling.of_scores());
      softmax.weigh(scores, scaling.of_scores());
      return factor;
    };
    const auto pack = [&] {
#pragma unroll
      for (i32 step = 0; step < C::block_n / 16; ++step) weights[step] = scores.template left<E>(0, step);
    };
    // Begins to form the first scores of a block of rows, if there is one more; else something that nobody takes.
    const auto begin = [&](bool more) {
      if (more) {
        m.query_turn[query.stage].wait_full(query.round);
        m.keys_turn[at.stage].wait_full(at.round);
      }
      ptx::wgmma_fence();
      multiply_keys();
    };

    Tiles<C, P> work(p);
    if (!work.more()) return;
    if (C::turns && group == groups - 1) pass_turn(group);
    begin(true);
    ptx::wgmma_wait<0>();
#pragma unroll 1
    for (bool more = true; more;) {
      const QueryBlock b = work.tile();
      i32 tile = key_tiles(b, mask) - 1;
      scores_are_there();
      sums.clear();
      softmax.start();
      weigh(b.first, tile * C::block_n);
      pack();
#pragma unroll 1
      while (--tile >= 0) {
        const auto before = at;
        at.next();
        m.keys_turn[at.stage].wait_full(at.round);
        if constexpr (C::turns) wait_turn(group);
        ptx::wgmma_fence();
        multiply_keys();
        add_values(before);
        if constexpr (C::turns) pass_turn(group);
        ptx::wgmma_wait<1>();
        scores_are_there();
        const PerRow factor = weigh(b.first, tile * C::block_n);
        ptx::compute_before(softmax.rows.slot[0].total + softmax.rows.slot[1].total);
        ptx::wgmma_wait<0>();
        sums_are_there(before);
        if (arch::any_changes(factor)) sums.each(factor, [](float f, i32, i32, float& x) { x *= f; });
        pack();
      }
      if (!out_in_query && arch::lane() == 0) m.query_turn[query.stage].leave();
      const i32 own_query = query.stage;
      work.next(), query.next();
      more = work.more();
      const auto before = at;
      at.next();
      ptx::wgmma_fence();
      add_values(before);
      // With room for two blocks' queries, the next scores are formed while these sums are stored.
      if constexpr (C::query_stages > 1) {
        begin(more);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      sums_are_there(before);
      finish(m, own_query, b, group, sums, softmax, p);
      if constexpr (C::query_stages == 1) begin(more);
      ptx::wgmma_wait<0>();
    }
  }

  // Takes scores away that a mask forbids, and those of keys that do not exist.
  static METHOD void hide(Scores& scores, i32 limit, i32 keys) {
    // Of each row the first column that is not visible, counted from this lane's first.
    const i32 own = Scores::column(0, 0);
    i32 end[2];
#pragma unroll
    for (i32 slot = 0; slot < 2; ++slot) end[slot] = base::least(keys, limit + Scores::row(0, 2 * slot) + 1) - own;
    scores.each_slot([&](i32 slot, i32, i32 column, float& x) { x = column - own < end[slot] ? x : -base::infinity; });
  }

  static METHOD void finish(Memory& m, i32 stage, QueryBlock const& b, i32 group, Sums& sums, Softmax& softmax,
                            P const& p) {
    softmax.gather();
    PerRow lse;
    const PerRow inverse = softmax.finish(lse);
    const auto factor = [&](i32 slot) { return inverse.slot[slot]; };
    if constexpr (out_in_query) {
      auto& out = reinterpret_cast<arch::BoxedRows<E, C::block_m, C::head_dim_v>&>(m.query[stage]);
      out.put(sums, factor);
      ptx::fence_proxy_async();
      ptx::sync_some(own_barrier + group, 128);
      if (ptx::thread_index() % 128 == 0) {
        const i32 row = group * group_rows;
        out.store(p.out_map, row, b.first + row, b.head, b.batch);
        ptx::tma_stores_commit();
        ptx::tma_stores_wait<0>();
        m.query_turn[stage].leave();
      }
    } else {
      const auto out = rows_view(p.out, b.batch, p.out_batch, b.head, p.out_head, b.first, p.out_row, 1);
      arch::store_rows<C::head_dim_v>(out, b.rows, sums, factor);
    }
    arch::store_per_row<Computing>(p.lse + ((i64)b.batch * p.heads_q + b.head) * p.seq_q + b.first, lse, b.rows);
  }

  // The warpgroups give the tensor cores their work in turns: while one waits for its products, another computes.
  static constexpr u32 turn_barrier = 1, own_barrier = turn_barrier + groups;
  static METHOD void wait_turn(i32 group) { ptx::sync_some(turn_barrier + group, 256); }
  static METHOD void pass_turn(i32 group) {
    ptx::arrive_some(turn_barrier + (group + 1 == groups ? 0 : group + 1), 256);
  }

  template <class M>
  static METHOD auto& registers(M& m) {
    return reinterpret_cast<float (&)[M::n_tiles * 4]>(m.at);
  }
  template <bool add>
  static METHOD void multiply(Scores& scores, u64 query, u64 keys, i32 step) {
    ptx::wgmma<add, false>(E{}, registers(scores), QueryRows::along(query, step), KeyRows::along(keys, step));
  }
};

}  // namespace attn
