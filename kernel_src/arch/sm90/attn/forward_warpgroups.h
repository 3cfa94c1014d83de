// Forward attention on Hopper: one warp has the copy engine bring queries, keys and values, and the warpgroups that
// compute find them in shared memory. A warpgroup has the tensor cores form the next scores and the present sums while
// it turns scores into weights (FlashAttention-3's order, Shah et al. 2024). See attn/forward.h for the formulas.
#pragma once
#include "attn/mask.h"
#include "attn/only.h"
#include "attn/softmax.h"
#include "attn/tiles.h"
#include "boxes.h"
#include "ring.h"

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
  using OutRows = arch::BoxedRows<E, C::block_m, C::head_dim_v>;
  using Scores = arch::Scores<Computing>;
  using Sums = arch::Matrix<arch::Warps<Computing::warps, 1>, C::block_m, base::round_up(C::head_dim_v, 16)>;
  using PerRow = arch::PerRow<Computing, float>;
  using Position = arch::Position<C::stages>;

  static_assert(!C::out_in_query || C::head_dim_v <= C::head_dim, "the output must fit where the queries were");
  struct OwnOut {
    OutRows rows;
  };
  struct Memory {
    QueryRows query;
    KeyRows keys[C::stages];
    ValueRows values[C::stages];
    Only<!C::out_in_query, OwnOut> out;
    arch::Turnover query_turn, keys_turn[C::stages], values_turn[C::stages];
  };

  static METHOD void run(i32, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      memory.query_turn.init(C::out_in_query ? groups : Computing::warps);
      for (i32 i = 0; i < C::stages; ++i) {
        memory.keys_turn[i].init(Computing::warps);
        memory.values_turn[i].init(Computing::warps);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    const i32 group = (i32)ptx::shuffle(ptx::thread_index() / 128, 0);
    if (group == groups) {
      if constexpr (groups == 2) ptx::setmaxnreg_dec<24>();
      if constexpr (groups == 3) ptx::setmaxnreg_dec<32>();
      if (ptx::thread_index() == 128 * groups) bring(memory, p);
    } else {
      if constexpr (groups == 2) ptx::setmaxnreg_inc<240>();
      if constexpr (groups == 3) ptx::setmaxnreg_inc<160>();
      compute(memory, group, p);
    }
  }

 private:
  // Tiles of keys that rows of the block see. They are taken from the last to the first.
  static METHOD i32 key_tiles(QueryBlock const& b, Mask<C, P, i32> const& mask) {
    return base::ceil_div(mask.keys_end(b.first, b.rows), C::block_n);
  }

  static METHOD void bring(Memory& memory, P const& p) {
    const Mask<C, P, i32> mask(p);
    Position position;
    u32 queries = 0;
    for (Tiles<C, P> work(p); work.more(); work.next()) {
      const QueryBlock b = work.tile();
      const i32 tiles = key_tiles(b, mask);
      const auto bring_keys = [&](i32 tile, Position at) {
        auto& turn = memory.keys_turn[at.stage];
        turn.wait_free(at.round);
        turn.expect(KeyRows::bytes);
        memory.keys[at.stage].fetch(p.k_map, turn.full(), tile * C::block_n, b.head_kv, b.batch);
      };
      const auto bring_values = [&](i32 tile, Position at) {
        auto& turn = memory.values_turn[at.stage];
        turn.wait_free(at.round);
        turn.expect(ValueRows::bytes);
        memory.values[at.stage].fetch(p.v_map, turn.full(), tile * C::block_n, b.head_kv, b.batch);
      };
      memory.query_turn.wait_free(queries);
      memory.query_turn.expect(QueryRows::bytes);
      memory.query.fetch(p.q_map, memory.query_turn.full(), b.first, b.head, b.batch);
      ++queries;
      if (tiles > 0) bring_keys(tiles - 1, position);
#pragma unroll 1
      for (i32 tile = tiles - 1; tile >= 0; --tile) {
        const Position at = position;
        position.next();
        if (tile > 0) bring_keys(tile - 1, position);
        bring_values(tile, at);
      }
    }
  }

  static METHOD void compute(Memory& memory, i32 group, P const& p) {
    const Mask<C, P, i32> mask(p);
    const Scaling scaling(p.scale);
    const bool elected = ptx::thread_index() % 128 == 0;
    Position position;
    u32 queries = 0;
    if (C::turns && group == groups - 1) pass_turn(group);
    for (Tiles<C, P> work(p); work.more(); work.next()) {
      const QueryBlock b = work.tile();
      const i32 tiles = key_tiles(b, mask);
      Sums sums;
      OnlineSoftmax<Computing> softmax;
      sums.clear();
      softmax.start();
      memory.query_turn.wait_full(queries++);
      if (tiles > 0) {
        Scores scores;
        arch::Operand<E> weights[C::block_n / 16];
        const u64 query = memory.query.rows_from(group * group_rows);
        // Scores -> weights; what sums so far must be multiplied by.
        const auto weigh = [&](i32 tile) {
          const i32 key = tile * C::block_n;
          if (key + C::block_n > mask.seq_kv || !mask.whole(b.first + group * group_rows, key + C::block_n)) {
            // Of each row the first column that is not visible, counted from this lane's first.
            const i32 limit = mask.limit(b.first, key), keys = mask.seq_kv - key, own = Scores::column(0, 0);
            i32 end[2];
            for (i32 slot = 0; slot < 2; ++slot)
              end[slot] = base::least(keys, limit + Scores::row(0, 2 * slot) + 1) - own;
            scores.each_slot([&](i32 slot, i32, i32 column, float& x) {
              x = column - own < end[slot] ? x : -base::infinity;
            });
          }
          const auto best = softmax.look(scores);
          const PerRow factor = softmax.raise(best, scaling.of_scores());
          softmax.weigh(scores, scaling.of_scores());
          return factor;
        };
        const auto pack = [&] {
#pragma unroll
          for (i32 step = 0; step < C::block_n / 16; ++step) weights[step] = scores.template left<E>(0, step);
        };
        const auto multiply_keys = [&](Position at) {
          const u64 keys = memory.keys[at.stage].rows_from(0);
          multiply<false>(scores, query, keys, 0);
#pragma unroll
          for (i32 step = 1; step < KeyRows::steps; ++step) multiply<true>(scores, query, keys, step);
          ptx::wgmma_commit();
        };
        const auto add_values = [&](Position at) {
          const u64 values = memory.values[at.stage].columns_from();
#pragma unroll
          for (i32 step = 0; step < C::block_n / 16; ++step)
            ptx::wgmma<true, true>(E{}, registers(sums), weights[step].word, ValueRows::across(values, step));
          ptx::wgmma_commit();
        };

        memory.keys_turn[position.stage].wait_full(position.round);
        ptx::wgmma_fence();
        multiply_keys(position);
        ptx::wgmma_wait<0>();
        ptx::registers_change(registers(scores));
        if (arch::lane() == 0) memory.keys_turn[position.stage].leave();
        weigh(tiles - 1);
        pack();
#pragma unroll 1
        for (i32 tile = tiles - 2; tile >= 0; --tile) {
          const Position before = position;
          position.next();
          memory.keys_turn[position.stage].wait_full(position.round);
          if constexpr (C::turns) wait_turn(group);
          ptx::wgmma_fence();
          multiply_keys(position);
          memory.values_turn[before.stage].wait_full(before.round);
          add_values(before);
          if constexpr (C::turns) pass_turn(group);
          ptx::wgmma_wait<1>();
          ptx::registers_change(registers(scores));
          if (arch::lane() == 0) memory.keys_turn[position.stage].leave();
          const PerRow factor = weigh(tile);
          ptx::compute_before(softmax.rows.slot[0].total + softmax.rows.slot[1].total);
          ptx::wgmma_wait<0>();
          ptx::registers_change(registers(sums));
          if (arch::lane() == 0) memory.values_turn[before.stage].leave();
          if (arch::any_changes(factor)) sums.each(factor, [](float f, i32, i32, float& x) { x *= f; });
          pack();
        }
        memory.values_turn[position.stage].wait_full(position.round);
        ptx::wgmma_fence();
        add_values(position);
        ptx::wgmma_wait<0>();
        ptx::registers_change(registers(sums));
        if (arch::lane() == 0) memory.values_turn[position.stage].leave();
        position.next();
      }
      if (!C::out_in_query && arch::lane() == 0) memory.query_turn.leave();
      finish(memory, b, group, elected, sums, softmax, p);
      if (C::out_in_query && elected) {
        ptx::tma_stores_wait<0>();
        memory.query_turn.leave();
      }
    }
    if (elected) ptx::tma_stores_wait<0>();  // shared memory must outlive them
  }

  static METHOD void finish(Memory& memory, QueryBlock const& b, i32 group, bool elected, Sums& sums,
                            OnlineSoftmax<Computing>& softmax, P const& p) {
    softmax.gather();
    PerRow lse;
    const PerRow inverse = softmax.finish(lse);
    OutRows& out = out_rows(memory);
    // What the copy engine still reads is not written over.
    if (!C::out_in_query && elected) ptx::tma_stores_wait<0>();
    ptx::sync_some(own_barrier + group, 128);
    out.put(sums, [&](i32 slot) { return inverse.slot[slot]; });
    ptx::fence_proxy_async();
    ptx::sync_some(own_barrier + group, 128);
    if (elected) {
      const i32 row = group * group_rows;
      out.store(p.out_map, row, b.first + row, b.head, b.batch);
      ptx::tma_stores_commit();
    }
    arch::store_per_row<Computing>(p.lse + ((i64)b.batch * p.heads_q + b.head) * p.seq_q + b.first, lse, b.rows);
  }

  static METHOD OutRows& out_rows(Memory& memory) {
    if constexpr (C::out_in_query)
      return reinterpret_cast<OutRows&>(memory.query);
    else
      return memory.out.rows;
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
