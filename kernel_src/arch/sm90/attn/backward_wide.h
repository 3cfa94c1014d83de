// Backward attention on Hopper for head dims beyond 128. A block of threads holds 64 keys: of each tile of query rows
// one warpgroup makes weights and from these dV, the other one gradients and dK; both form dQ. Two blocks are a
// cluster, whose keys are neighbours. See attn/backward.h for the formulas.
#pragma once
#include "attn/backward_rows.h"
#include "attn/gathered_grad_query.h"
#include "roles.h"

namespace attn {

template <class C, class P>
struct BackwardWide {
  using E = typename C::Element;
  static constexpr i32 groups = 2;
  static_assert(C::warps == 4 * (groups + 1) && C::block_n == 64 && C::block_m == 64 && C::key_stages == 1, "");
  using KeyRows = arch::BoxedRows<E, C::block_n, C::head_dim>;
  using ValueRows = arch::BoxedRows<E, C::block_n, C::head_dim_v>;
  using QueryRows = arch::BoxedRows<E, C::block_m, C::head_dim>;
  using OutRows = arch::BoxedRows<E, C::block_m, C::head_dim_v>;
  using GradQuery = GatheredGradQuery<C, P, groups, groups>;
  using GradientRows = typename GradQuery::GradientRows;

  using Group = arch::EachWarpgroup;
  using Scores = arch::Matrix<Group, C::block_n, C::block_m>;  // or gradients of probabilities
  using Keyed = KeyMajor<Scores>;
  using Words = arch::Operand<E>[C::block_m / 16];
  using GradKeys = arch::Matrix<Group, C::block_n, base::round_up(C::head_dim, 16)>;
  using GradValues = arch::Matrix<Group, C::block_n, base::round_up(C::head_dim_v, 16)>;
  using Row = RowData<C, P>;
  using Tiles = RowTiles<C, P>;
  using Cluster = arch::Cluster<C::cluster>;
  using RowsAt = arch::Position<C::stages>;
  using GradientsAt = typename GradQuery::At;

  struct Memory {
    KeyRows keys;
    ValueRows values;
    // Q and dO of one tile after the other.
    static constexpr i32 stage_bytes = base::most(QueryRows::bytes, OutRows::bytes);
    alignas(1024) char rows[C::stages][stage_bytes];
    // With gradients that are weights at first, until a thread replaces its own.
    typename GradQuery::Memory grad_query;
    alignas(16) float statistics[C::stages][C::block_m];  // LSE beside Q, delta beside dO
    typename GradQuery::Turns grad_query_turns;
    arch::Turnover keys_turn, rows_turn[C::stages], weights_turn[2];

    METHOD QueryRows& query(RowsAt const& at) { return reinterpret_cast<QueryRows&>(rows[at.stage]); }
    METHOD OutRows& grad_out(RowsAt const& at) { return reinterpret_cast<OutRows&>(rows[at.stage]); }
  };

  static METHOD void run(i32, Memory& memory, P const& p) {
    if (ptx::thread_index() == 0) {
      memory.keys_turn.init(groups);
      for (auto& turn : memory.rows_turn) turn.init(128 * groups);
      for (auto& turn : memory.weights_turn) ptx::mbarrier_init(turn.full(), 128);
      memory.grad_query_turns.init(128);
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
  static METHOD void bring(Memory& m, u32 rank, P const& p) {
    RowsAt at;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) {
      const KeyBlock both = work.block(), b = GradQuery::of_block_in(both, rank);
      const u32 full = m.keys_turn.full();
      m.keys_turn.wait_free(work.done);
      m.keys_turn.expect(KeyRows::bytes + ValueRows::bytes + GradQuery::far_bytes);
      m.keys.fetch(p.k_map, full, b.first, b.head_kv, b.batch);
      m.values.fetch(p.v_map, full, b.first, b.head_kv, b.batch);
      GradQuery::fetch_far_keys(m.grad_query, 0, full, both, rank, p);
#pragma unroll 1
      for (Tiles tiles(both, Mask<C, P, i32>(p), p); tiles.more(); tiles.next(p)) {
        const i64 row = tiles.data_row(b, p);
        m.query(at).fetch(p.q_map, expect(m, at, QueryRows::bytes, Row::lse(row, p)), tiles.row, tiles.head, b.batch);
        at.next();
        m.grad_out(at).fetch(p.grad_out_map, expect(m, at, OutRows::bytes, Row::delta(row, p)), tiles.row, tiles.head,
                             b.batch);
        at.next();
      }
    }
  }
  // The mbarrier at which rows are expected, with something of each row.
  static METHOD u32 expect(Memory& m, RowsAt const& at, u32 bytes, const float* statistics) {
    auto& turn = m.rows_turn[at.stage];
    turn.wait_free(at.round);
    turn.expect(bytes + sizeof m.statistics[0]);
    ptx::bulk_load(ptx::shared_address(m.statistics[at.stage]), statistics, sizeof m.statistics[0], turn.full());
    return turn.full();
  }

  // Where the tile under way is.
  struct Progress {
    RowsAt query, grad_out;
    GradientsAt now;
    METHOD Progress() { grad_out.next(); }
    METHOD void next() { query.next(), query.next(), grad_out.next(), grad_out.next(), now.next(); }
  };

  static METHOD void compute(Memory& m, i32 group, u32 rank, P const& p) {
    Progress at;
    if (group == 0) {
#pragma unroll 1
      for (KeyBlocks<C, P> work(p); work.more(); ++work.done) differentiate_values(m, at, work, rank, p);
    } else {
#pragma unroll 1
      for (KeyBlocks<C, P> work(p); work.more(); ++work.done) differentiate_keys(m, at, work, rank, p);
    }
  }

  // Makes weights and dV.
  static METHOD void differentiate_values(Memory& m, Progress& at, KeyBlocks<C, P> const& work, u32 rank, P const& p) {
    const KeyBlock both = work.block(), b = GradQuery::of_block_in(both, rank);
    const Mask<C, P, i32> mask(p);
    const float scale = p.scale * base::log2_e;
    GradValues grad_v;
    GradQuery grad_q(m.grad_query, m.grad_query_turns, 0, rank);
    Tiles tiles(both, mask, p);
    grad_q.begin_keys(m.keys, 0);
    m.keys_turn.wait_full(work.done);
    if (!tiles.more()) {
      grad_v.clear();
      return finish(m, m.values, p.grad_v_map, grad_v, 1.0f, 0, work, rank);
    }
    Scores scores;
    bool first = true;
    m.rows_turn[at.query.stage].wait_full(at.query.round);
    ptx::wgmma_fence();
    multiply_along<QueryRows>(scores, m.keys, m.query(at.query).rows_from(0));
#pragma unroll 1
    do {
      const float (&lse)[C::block_m] = m.statistics[at.query.stage];
      Words words;
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(scores));
      Keyed::make_weights(scores, lse, scale);
      const i32 keys_end = b.first + C::block_n;
      if (!mask.whole(tiles.row, keys_end) || keys_end > p.seq_kv || Keyed::any_coarse_row(lse))
        Keyed::correct(scores, mask.limit(tiles.row, b.first), b.keys);
      Keyed::pack(words, scores);
      m.rows_turn[at.query.stage].leave();
      m.grad_query_turns.wait_free(at.now);
      m.grad_query.gradients[at.now.stage].template put_operands<Scores>(words);
      ptx::mbarrier_arrive(m.weights_turn[at.now.stage].full());

      m.rows_turn[at.grad_out.stage].wait_full(at.grad_out.round);
      ptx::wgmma_fence();
      add<OutRows>(grad_v, words, m.grad_out(at.grad_out).columns_from(), first);
      ptx::wgmma_commit();
      grad_q.multiply();
      ptx::wgmma_wait<1>();
      m.rows_turn[at.grad_out.stage].leave();
      const Tiles tile = tiles;
      const GradientsAt now = at.now;
      tiles.next(p);
      at.next();
      // After the last rows something that nobody takes.
      if (tiles.more()) m.rows_turn[at.query.stage].wait_full(at.query.round);
      ptx::wgmma_fence();
      multiply_along<QueryRows>(scores, m.keys, (tiles.more() ? m.query(at.query) : m.keys).rows_from(0));
      ptx::wgmma_wait<1>();
      grad_q.deliver(p);
      grad_q.next(tile, b, now, p);
      first = false;
    } while (tiles.more());
    ptx::wgmma_wait<0>();
    ptx::registers_change(registers(scores));
    ptx::registers_change(registers(grad_v));
    grad_q.finish_keys(p);
    finish(m, m.values, p.grad_v_map, grad_v, 1.0f, 0, work, rank);
  }

  // Makes gradients and dK.
  static METHOD void differentiate_keys(Memory& m, Progress& at, KeyBlocks<C, P> const& work, u32 rank, P const& p) {
    const KeyBlock both = work.block(), b = GradQuery::of_block_in(both, rank);
    GradKeys grad_k;
    GradQuery grad_q(m.grad_query, m.grad_query_turns, 1, rank);
    Tiles tiles(both, Mask<C, P, i32>(p), p);
    grad_q.begin_keys(m.keys, 0);
    m.keys_turn.wait_full(work.done);
    if (!tiles.more()) {
      grad_k.clear();
      return finish(m, m.keys, p.grad_k_map, grad_k, p.scale, 1, work, rank);
    }
    bool first = true;
#pragma unroll 1
    do {
      Scores gradients;
      Words words;
      m.rows_turn[at.grad_out.stage].wait_full(at.grad_out.round);
      ptx::wgmma_fence();
      multiply_along<OutRows>(gradients, m.values, m.grad_out(at.grad_out).rows_from(0));
      m.weights_turn[at.now.stage].wait_full(at.now.round);
      ptx::wgmma_wait<0>();
      ptx::registers_change(registers(gradients));
      make_gradients(gradients, m.grad_query.gradients[at.now.stage], m.statistics[at.grad_out.stage]);
      Keyed::pack(words, gradients);
      m.rows_turn[at.grad_out.stage].leave();
      m.grad_query.gradients[at.now.stage].template put_operands<Scores>(words);
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(m.grad_query_turns.own[at.now.stage].full());

      m.rows_turn[at.query.stage].wait_full(at.query.round);
      ptx::wgmma_fence();
      add<QueryRows>(grad_k, words, m.query(at.query).columns_from(), first);
      ptx::wgmma_commit();
      grad_q.multiply();
      ptx::wgmma_wait<1>();
      m.rows_turn[at.query.stage].leave();
      ptx::wgmma_wait<0>();
      grad_q.deliver(p);
      grad_q.next(tiles, b, at.now, p);
      tiles.next(p);
      at.next();
      first = false;
    } while (tiles.more());
    ptx::registers_change(registers(grad_k));
    grad_q.finish_keys(p);
    finish(m, m.keys, p.grad_k_map, grad_k, p.scale, 1, work, rank);
  }

  // scores = keys rows^T
  template <class RowsOfQueries, class RowsOfKeys>
  static METHOD void multiply_along(Scores& scores, RowsOfKeys const& of_keys, u64 queries) {
    const u64 keys = ptx::swizzled(ptx::here_and_now(of_keys.address()));
    ptx::wgmma<false, false>(E{}, registers(scores), keys, queries);
#pragma unroll
    for (i32 step = 1; step < RowsOfQueries::steps; ++step)
      ptx::wgmma<true, false>(E{}, registers(scores), RowsOfKeys::along(keys, step),
                              RowsOfQueries::along(queries, step));
    ptx::wgmma_commit();
  }
  // Gradients of probabilities -> gradients of scores.
  static METHOD void make_gradients(Scores& gradients, GradientRows const& weights, const float* delta) {
    weights.template each_put<Scores>([&](i32 tile, i32 slot, u32 word) {
      const i32 column = Scores::column(tile, 0);
      float (&x)[4] = gradients.at[0][tile];
      x[2 * slot] = arch::element<E>({word}, 0) * (x[2 * slot] - delta[column]);
      x[2 * slot + 1] = arch::element<E>({word}, 1) * (x[2 * slot + 1] - delta[column + 1]);
    });
  }
  // to += weights rows, or at first to = weights rows
  template <class Rows, class M>
  static METHOD void add(M& to, const Words& weights, u64 rows, bool first) {
#pragma unroll
    for (i32 step = 0; step < C::block_m / 16; ++step)
      ptx::wgmma<true, true>(E{}, registers(to), weights[step].word, Rows::across(rows, step), step > 0 || !first);
  }

  // Stores a warpgroup's sums through the rows that they belong to.
  template <class Rows, class M>
  static METHOD void finish(Memory& m, Rows& rows, TensorMap const& map, M const& sums, float scale, i32 group,
                            KeyBlocks<C, P> const& work, u32 rank) {
    constexpr u32 everyone = 1, own_group = 2;
    ptx::sync_some(everyone, 128 * groups);  // nobody multiplies with these keys and values any more
    rows.put(sums, [&](i32) { return scale; });
    ptx::fence_proxy_async();
    ptx::sync_some(own_group + group, 128);
    if (ptx::thread_index() % 128 == 0) {
      const KeyBlock b = GradQuery::of_block_in(work.block(), rank);
      rows.store(map, 0, b.first, b.head_kv, b.batch);
      ptx::tma_stores_commit();
      ptx::tma_stores_wait<0>();
      m.keys_turn.leave();
    }
  }

  template <class M>
  static METHOD auto& registers(M& m) {
    return reinterpret_cast<float (&)[M::n_tiles * 4]>(m.at);
  }
};

}  // namespace attn
