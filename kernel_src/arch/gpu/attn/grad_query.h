// dQ in a pass of its own, so that every sum has one order: a block of threads holds a block of query rows, and the
// keys that they see pass through shared memory. See attn/backward.h for the formulas.
#pragma once
#include "attn/layout.h"
#include "attn/magnitude.h"
#include "attn/mask.h"
#include "attn/probability.h"
#include "attn/schedule.h"
#include "attn/workspace.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct GradQuery {
  using E = typename C::Element;
  static constexpr i32 threads = 32 * C::warps;
  using QueryRows = arch::SharedRows<E, C::block_m, C::head_dim, arch::columns<C>(C::head_dim)>;
  using OutRows = arch::SharedRows<E, C::block_m, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using KeyRows = arch::SharedRows<E, C::block_n, C::head_dim, arch::columns<C>(C::head_dim)>;
  using ValueRows = arch::SharedRows<E, C::block_n, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using Scores = arch::Scores<C>;
  using Sums = arch::Matrix<arch::Warps<C::warps, 1>, C::block_m, arch::columns<C>(C::head_dim)>;
  using Row = RowData<C, P>;

  struct Tile {
    KeyRows keys;
    ValueRows values;
  };
  union Memory {
    struct {
      QueryRows query;
      OutRows grad_out;
      Tile tiles[C::stages];
    } in;
    QueryRows out;
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    auto& m = memory.in;
    const QueryBlock b = query_block<C>(block, p, 1);
    const Mask<C, P, i32> mask(p);
    const auto q = rows_view(p.q, b.batch, p.q_batch, b.head, p.q_head, b.first, p.q_row, p.q_dim);
    const auto grad_out = rows_view(p.grad_out, b.batch, p.grad_out_batch, b.head, p.grad_out_head, b.first,
                                    p.grad_out_row, p.grad_out_dim);
    const auto k = rows_view(p.k, b.batch, p.k_batch, b.head_kv, p.k_head, 0, p.k_row, p.k_dim);
    const auto v = rows_view(p.v, b.batch, p.v_batch, b.head_kv, p.v_head, 0, p.v_row, p.v_dim);
    const auto fetch = [&](Tile& tile, i32 key) {
      tile.keys.template fetch_rows<threads, C::vector>(k.from(key), keys_left(key, p));
      tile.values.template fetch_rows<threads, C::vector>(v.from(key), keys_left(key, p));
    };

    const i64 head = (i64)b.batch * p.heads_q + b.head, head_kv = (i64)b.batch * p.heads_kv + b.head_kv;
    const KeyPowers<C, P> of_keys(head_kv, p);
    const QueryPowers<C, P> of_query(head, head_kv, p);
    const auto tile_arrives = [&](Tile& tile) {
      tile.keys.template make_operands<threads>(of_keys.k.in);
      tile.values.template make_operands<threads>(of_keys.v.in);
    };

    Sums sums;
    sums.clear();
    float lse[2 * Scores::m_tiles], delta[2 * Scores::m_tiles];
#pragma unroll
    for (i32 i = 0; i < 2 * Scores::m_tiles; ++i) {
      const i32 row = Scores::row(i / 2, i % 2 * 2);
      const i64 at = Row::row(head, b.first + row, p);
      lse[i] = row < b.rows ? *Row::lse(at, p) : base::infinity;
      delta[i] = row < b.rows ? *Row::delta(at, p) : 0.0f;
    }
    const bool coarse = any_coarse(lse);
    const i32 keys_end = mask.keys_end(b.first, b.rows);
    m.query.template fetch_rows<threads, C::vector>(q, (i32)b.rows);
    m.grad_out.template fetch_rows<threads, C::vector>(grad_out, (i32)b.rows);
    if (keys_end > 0) fetch(m.tiles[0], 0);
    arch::arrive([&] {
      m.query.template make_operands<threads>(of_query.q.in);
      m.grad_out.template make_operands<threads>(of_query.grad_out.in);
      if (keys_end > 0) tile_arrives(m.tiles[0]);
    });
    i32 stage = 0;
    for (i32 key = 0; key < keys_end; key += C::block_n) {
      const i32 next = key + C::block_n;
      const Tile& tile = m.tiles[stage];
      if (C::stages > 1 && next < keys_end) fetch(m.tiles[(stage + 1) % C::stages], next);
      Scores weights, gradients;
      weights.clear();
      gradients.clear();
      arch::multiply<E, QueryRows::steps, C::scores_ahead>(
          weights, [&](i32 i, i32 step) { return m.query.left(Scores::first_row() + i * 16, step); },
          [&](i32 j, i32 step) { return tile.keys.right(j * 16, step); });
      arch::multiply<E, OutRows::steps, C::scores_ahead>(
          gradients, [&](i32 i, i32 step) { return m.grad_out.left(Scores::first_row() + i * 16, step); },
          [&](i32 j, i32 step) { return tile.values.right(j * 16, step); });
      const float scale = p.scale * base::log2_e * of_query.q.out() * of_keys.k.out();
      weights.each_slot([&](i32 slot, i32, i32, float& x) { x = arch::exp2(x * scale - lse[slot]); });
      if (!mask.whole(b.first + Scores::first_row(), next) || next > p.seq_kv || coarse) {
        const i32 limit = mask.limit(b.first, key), keys = keys_left(key, p);
        weights.each_slot(
            [&](i32, i32 row, i32 column, float& x) { x = corrected(x, column >= keys || column - row > limit); });
      }
      const float unit = of_query.grad_out.out() * of_keys.v.out();
      gradients.each_with(weights, [&](i32 slot, float& x, float weight) { x = weight * (x * unit - delta[slot]); });
      arch::multiply_wide<E, C::block_n / arch::step, C::sums_ahead>(
          sums, [&](i32 i, i32 step) { return gradients.template left<E>(i, step, of_query.gradients.in); },
          [&](i32 j, i32 step) { return tile.keys.right_by_rows(step * arch::step, j * 16); },
          of_query.gradients.out() * of_keys.k.out());
      if (C::stages == 1) {
        ptx::sync_block();
        if (next < keys_end) fetch(m.tiles[0], next);
      }
      stage = (stage + 1) % C::stages;
      arch::arrive([&] {
        if (next < keys_end) tile_arrives(m.tiles[stage]);
      });
    }
    sums.put(memory.out, [&](i32) { return p.scale; });
    ptx::sync_block();
    const auto to = rows_view(p.grad_q, b.batch, p.grad_q_batch, b.head, p.grad_q_head, b.first, p.grad_q_row, 1);
    memory.out.template store_rows<threads>(to, (i32)b.rows);
  }

 private:
  static METHOD i32 keys_left(i32 key, P const& p) { return base::least(C::block_n, (i32)p.seq_kv - key); }
};

}  // namespace attn
