// What Hopper's backward kernels share: the tiles of query rows that pass through shared memory, and what is done to
// scores that have keys as rows.
#pragma once
#include "attn/mask.h"
#include "attn/probability.h"
#include "attn/schedule.h"
#include "attn/workspace.h"
#include "boxes.h"
#include "ring.h"

namespace attn {

// The tiles of query rows that see a block of keys, of one query head of the group after the other. Where there are
// more than two blocks of keys they begin at rows of their own of their first head, so that fewer add to the same rows
// of dQ at a time. Where they add in the order of the keys all go from the last rows to the first: then each but waits
// for one that had these rows just before, under a causal mask too.
template <class C, class P>
struct RowTiles {
  i32 first, last, row, head, left;
  METHOD RowTiles(KeyBlock const& b, Mask<C, P, i32> const& mask, P const& p) {
    // Rows that see nothing have a dQ too, if one is stored here.
    first = C::complete ? 0 : mask.rows_begin(b.first) / C::block_m * C::block_m;
    row = first, last = first, head = b.head_kv * group(p);
    left = 0;
    if (first >= (i32)p.seq_q) return;
    const u32 tiles = base::ceil_div((u32)((i32)p.seq_q - first), (u32)C::block_m);
    left = (i32)tiles * group(p);
    if constexpr (C::ordered) {
      row = last = first + (i32)(tiles - 1) * C::block_m;
      return;
    }
    const u32 block = (u32)(b.first / C::block_n), blocks = base::ceil_div((u32)p.seq_kv, (u32)C::block_n);
    if (blocks > 2) row += (i32)(block * base::most(tiles / blocks, 1u) % tiles) * C::block_m;
  }
  METHOD bool more() const { return left > 0; }
  METHOD void next(P const& p) {
    --left;
    row += C::ordered ? -C::block_m : C::block_m;
    if (C::ordered ? row >= first : row < (i32)p.seq_q) return;
    row = C::ordered ? last : first;
    ++head;
    if (head % group(p) == 0) head -= group(p);  // the rows left out at the beginning
  }
  // In the workspace.
  METHOD i64 data_row(KeyBlock const& b, P const& p) const {
    return RowData<C, P>::row((i64)b.batch * p.heads_q + head, row, p);
  }

 private:
  static METHOD i32 group(P const& p) { return (i32)((u32)p.heads_q / (u32)p.heads_kv); }
};

// Tiles of Q and dO of a padded width, with the LSE and delta of their rows.
template <class C, class P, i32 width, i32 width_v>
struct RowStages {
  using E = typename C::Element;
  using QueryRows = arch::BoxedRows<E, C::block_m, width>;
  using OutRows = arch::BoxedRows<E, C::block_m, width_v>;
  QueryRows query[C::stages];
  OutRows grad_out[C::stages];
  struct Statistics {
    alignas(16) float lse[C::block_m], delta[C::block_m];
  } statistics[C::stages];
  arch::Turnover query_turn[C::stages], grad_out_turn[C::stages];

  METHOD void init(u32 users) {
    for (i32 i = 0; i < C::stages; ++i) query_turn[i].init(users), grad_out_turn[i].init(users);
  }
  METHOD void leave(i32 stage) { query_turn[stage].leave(), grad_out_turn[stage].leave(); }

  METHOD void bring(RowTiles<C, P> tiles, arch::Position<C::stages>& at, KeyBlock const& b, P const& p) {
    using Row = RowData<C, P>;
    constexpr u32 statistics_bytes = 4 * C::block_m;
#pragma unroll 1
    for (; tiles.more(); tiles.next(p), at.next()) {
      const i32 stage = at.stage;
      const i64 row = tiles.data_row(b, p);
      auto &query_turn = this->query_turn[stage], &grad_out_turn = this->grad_out_turn[stage];
      query_turn.wait_free(at.round);
      query_turn.expect(QueryRows::bytes + statistics_bytes);
      query[stage].fetch(p.q_map, query_turn.full(), tiles.row, tiles.head, b.batch);
      ptx::bulk_load(ptx::shared_address(statistics[stage].lse), Row::lse(row, p), statistics_bytes, query_turn.full());
      grad_out_turn.wait_free(at.round);
      grad_out_turn.expect(OutRows::bytes + statistics_bytes);
      grad_out[stage].fetch(p.grad_out_map, grad_out_turn.full(), tiles.row, tiles.head, b.batch);
      ptx::bulk_load(ptx::shared_address(statistics[stage].delta), Row::delta(row, p), statistics_bytes,
                     grad_out_turn.full());
    }
  }
};

// Scores M with keys as rows and query rows as columns.
template <class M>
struct KeyMajor {
  // Scores -> probabilities.
  static METHOD void make_weights(M& weights, const float* lse, float scale) {
#pragma unroll
    for (i32 j = 0; j < M::n_tiles; ++j) {
      const Pair of = pair(lse, j);
      float (&x)[4] = weights.at[0][j];
      x[0] = arch::exp2(x[0] * scale - of.first), x[1] = arch::exp2(x[1] * scale - of.second);
      x[2] = arch::exp2(x[2] * scale - of.first), x[3] = arch::exp2(x[3] * scale - of.second);
    }
  }
  // Gradients of probabilities -> gradients of scores.
  static METHOD void make_gradients(M& gradients, M const& weights, const float* delta) {
#pragma unroll
    for (i32 j = 0; j < M::n_tiles; ++j) {
      const Pair of = pair(delta, j);
      float (&x)[4] = gradients.at[0][j];
      const float (&weight)[4] = weights.at[0][j];
      x[0] = weight[0] * (x[0] - of.first), x[1] = weight[1] * (x[1] - of.second);
      x[2] = weight[2] * (x[2] - of.first), x[3] = weight[3] * (x[3] - of.second);
    }
  }
  // The same for probabilities that a mask may forbid, or whose LSE is coarse. `limit` is the mask's.
  static METHOD void correct(M& weights, i32 limit, i32 keys) {
    // Of each key the first query row that sees it, counted from this lane's first.
    const i32 own = M::column(0, 0);
    i32 begin[2];
#pragma unroll
    for (i32 slot = 0; slot < 2; ++slot) {
      const i32 key = M::row(0, 2 * slot);
      begin[slot] = key < keys ? key - limit - own : 1 << 30;
    }
    weights.each_slot([&](i32 slot, i32, i32 column, float& x) { x = corrected(x, column - own < begin[slot]); });
  }
  template <i32 rows>
  static METHOD bool any_coarse_row(const float (&lse)[rows]) {
    float own[rows / 32];
#pragma unroll
    for (i32 i = 0; i < rows / 32; ++i) own[i] = lse[i * 32 + arch::lane()];
    return ptx::any(any_coarse(own));
  }
  template <class E>
  static METHOD void pack(arch::Operand<E> (&to)[M::n_tiles / 2], M const& from) {
#pragma unroll
    for (i32 step = 0; step < M::n_tiles / 2; ++step) to[step] = from.template left<E>(0, step);
  }

 private:
  // What belongs to this lane's columns of a tile.
  struct alignas(8) Pair {
    float first, second;
  };
  static METHOD Pair pair(const float* from, i32 tile) {
    return *reinterpret_cast<const Pair*>(from + M::column(tile, 0));
  }
};

}  // namespace attn
