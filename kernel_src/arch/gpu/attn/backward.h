// Backward attention as a GPU runs it: a block of threads holds a tile of keys and values and its dK and dV, and the
// query rows that see it pass through shared memory. See attn/backward.h for the formulas.
#pragma once
#include "accumulate.h"
#include "attn/layout.h"
#include "attn/magnitude.h"
#include "attn/mask.h"
#include "attn/only.h"
#include "attn/probability.h"
#include "attn/schedule.h"
#include "attn/workspace.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Backward {
  using E = typename C::Element;
  static constexpr i32 threads = 32 * C::warps;
  using KeyRows = arch::SharedRows<E, C::block_n, C::head_dim, arch::columns<C>(C::head_dim)>;
  using ValueRows = arch::SharedRows<E, C::block_n, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using QueryRows = arch::SharedRows<E, C::block_m, C::head_dim, arch::columns<C>(C::head_dim)>;
  using OutRows = arch::SharedRows<E, C::block_m, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using WeightRows = arch::SharedRows<E, C::block_m, C::block_n>;

  template <i32 down>
  using Grid = arch::Warps<down, C::warps / down>;
  using Scores = arch::Matrix<Grid<C::score_warps>, C::block_m, C::block_n>;
  using GradKeys = arch::Matrix<Grid<C::key_warps>, C::block_n, arch::columns<C>(C::head_dim)>;
  using GradValues = arch::Matrix<Grid<C::key_warps>, C::block_n, arch::columns<C>(C::head_dim_v)>;
  using GradQueries = arch::Matrix<Grid<C::query_warps>, C::block_m, arch::columns<C>(C::head_dim)>;
  using Row = RowData<C, P>;

  // What comes with a tile of query rows.
  struct Rows {
    QueryRows query;
    OutRows grad_out;
    alignas(16) float lse[C::block_m], delta[C::block_m];
  };
  union Memory {
    struct {
      KeyRows keys;
      Only<C::grad_keys, ValueRows> values;
      Rows rows[C::stages];
      Only<C::grad_values, WeightRows> weights;
      Only<C::grad_keys, WeightRows> gradients;
    } in;
    struct {
      Only<C::grad_keys, KeyRows> grad_k;
      Only<C::grad_values, ValueRows> grad_v;
    } out;
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    auto& m = memory.in;
    const KeyBlock b = key_block<C>(block, p);
    const Mask<C, P, i32> mask(p);
    const auto k = rows_view(p.k, b.batch, p.k_batch, b.head_kv, p.k_head, b.first, p.k_row, p.k_dim);
    const auto v = rows_view(p.v, b.batch, p.v_batch, b.head_kv, p.v_head, b.first, p.v_row, p.v_dim);
    GradKeys grad_k;
    GradValues grad_v;
    grad_k.clear();
    grad_v.clear();

    Tiles tiles(b, mask, p);
    const KeyPowers<C, P> of_keys((i64)b.batch * p.heads_kv + b.head_kv, p);
    QueryPowers<C, P> of_query = tiles.powers(b, p);
    const auto rows_arrive = [&](Rows& rows) {
      rows.query.template make_operands<threads>(of_query.q.in);
      rows.grad_out.template make_operands<threads>(of_query.grad_out.in);
    };
    if (tiles.more()) {
      m.keys.template fetch_rows<threads, C::vector>(k, (i32)b.keys);
      if constexpr (C::grad_keys) m.values.template fetch_rows<threads, C::vector>(v, (i32)b.keys);
      fetch_query(m.rows[0], tiles, p);
      fetch_grad_out(m.rows[0], tiles, p);
      arch::arrive([&] {
        m.keys.template make_operands<threads>(of_keys.k.in);
        if constexpr (C::grad_keys) m.values.template make_operands<threads>(of_keys.v.in);
        rows_arrive(m.rows[0]);
      });
    }
    for (i32 stage = 0; tiles.more(); stage = (stage + 1) % C::stages) {
      Rows& rows = m.rows[stage];
      const Tiles now = tiles;
      tiles.advance(p);
      // With two stages the next rows arrive during all products, with one as soon as the last product with them is
      // done.
      if (C::stages > 1 && tiles.more()) {
        fetch_query(m.rows[(stage + 1) % C::stages], tiles, p);
        fetch_grad_out(m.rows[(stage + 1) % C::stages], tiles, p);
      }
      differentiate(m, rows, now, b, mask, of_keys, of_query, p);
      ptx::sync_block();
      if constexpr (C::grad_values)
        arch::multiply_wide<E, C::block_m / arch::step, C::sums_ahead>(
            grad_v,
            [&](i32 i, i32 k) { return m.weights.left_by_rows(k * arch::step, GradValues::first_row() + i * 16); },
            [&](i32 j, i32 k) {
              return rows.grad_out.right_by_rows(k * arch::step, GradValues::first_column() + j * 16);
            },
            of_query.grad_out.out());
      if (C::stages == 1) {
        ptx::sync_block();
        if (tiles.more()) fetch_grad_out(rows, tiles, p);
      }
      if constexpr (C::grad_query) add_grad_query(m, now, of_query.gradients.out() * of_keys.k.out(), p);
      if constexpr (C::grad_keys)
        arch::multiply_wide<E, C::block_m / arch::step, C::sums_ahead>(
            grad_k,
            [&](i32 i, i32 k) { return m.gradients.left_by_rows(k * arch::step, GradKeys::first_row() + i * 16); },
            [&](i32 j, i32 k) { return rows.query.right_by_rows(k * arch::step, GradKeys::first_column() + j * 16); },
            of_query.gradients.out() * of_query.q.out());
      if (C::stages == 1) {
        ptx::sync_block();
        if (tiles.more()) fetch_query(rows, tiles, p);
      }
      arch::arrive([&] {
        if (!tiles.more()) return;
        if (tiles.head != now.head) of_query = tiles.powers(b, p);
        rows_arrive(m.rows[(stage + 1) % C::stages]);
      });
    }
    finish(memory, b, grad_k, grad_v, p);
  }

 private:
  // The tiles of query rows that see the keys, of one query head of the group after the other.
  struct Tiles {
    i32 first, row;
    i32 batch, head, heads_end;
    METHOD Tiles(KeyBlock const& b, Mask<C, P, i32> const& mask, P const& p) {
      const i32 group = (i32)((u32)p.heads_q / (u32)p.heads_kv);
      first = row = mask.rows_begin(b.first) / C::block_m * C::block_m;
      batch = b.batch;
      head = b.head_kv * group;
      heads_end = first < (i32)p.seq_q ? head + group : head;
    }
    METHOD bool more() const { return head < heads_end; }
    METHOD void advance(P const& p) {
      row += C::block_m;
      if (row >= (i32)p.seq_q) row = first, ++head;
    }
    METHOD i32 count(P const& p) const { return base::least(C::block_m, (i32)p.seq_q - row); }
    METHOD QueryPowers<C, P> powers(KeyBlock const& b, P const& p) const {
      return {(i64)batch * p.heads_q + head, (i64)batch * p.heads_kv + b.head_kv, p};
    }
    METHOD i64 data_row(P const& p) const { return Row::row((i64)batch * p.heads_q + head, row, p); }
  };

  static METHOD void fetch_query(Rows& rows, Tiles const& t, P const& p) {
    const auto q = rows_view(p.q, t.batch, p.q_batch, t.head, p.q_head, t.row, p.q_row, p.q_dim);
    rows.query.template fetch_rows<threads, C::vector>(q, t.count(p));
    fetch_statistics(rows.lse, Row::lse(t.data_row(p), p));
  }
  static METHOD void fetch_grad_out(Rows& rows, Tiles const& t, P const& p) {
    const auto grad_out = rows_view(p.grad_out, t.batch, p.grad_out_batch, t.head, p.grad_out_head, t.row,
                                    p.grad_out_row, p.grad_out_dim);
    rows.grad_out.template fetch_rows<threads, C::vector>(grad_out, t.count(p));
    fetch_statistics(rows.delta, Row::delta(t.data_row(p), p));
  }
  static METHOD void fetch_statistics(float* to, const float* from) {
    const i32 first = 4 * (i32)ptx::thread_index();
    if (first < C::block_m) arch::fetch<16>(ptx::shared_address(to + first), from + first, 16);
  }

  // Probabilities and gradients of scores, left in shared memory.
  template <class In>
  static METHOD void differentiate(In& m, Rows& rows, Tiles const& t, KeyBlock const& b, Mask<C, P, i32> const& mask,
                                   KeyPowers<C, P> const& of_keys, QueryPowers<C, P> const& of_query, P const& p) {
    Scores weights, gradients;
    weights.clear();
    gradients.clear();
    arch::multiply<E, QueryRows::steps, C::scores_ahead>(
        weights, [&](i32 i, i32 k) { return rows.query.left(Scores::first_row() + i * 16, k); },
        [&](i32 j, i32 k) { return m.keys.right(Scores::first_column() + j * 16, k); });
    const float scale = p.scale * base::log2_e * of_query.q.out() * of_keys.k.out();
    float lse[2 * Scores::m_tiles], delta[2 * Scores::m_tiles];
#pragma unroll
    for (i32 i = 0; i < 2 * Scores::m_tiles; ++i) {
      lse[i] = rows.lse[Scores::row(i / 2, i % 2 * 2)];
      delta[i] = rows.delta[Scores::row(i / 2, i % 2 * 2)];
    }
    // These pass while the next products run.
    weights.each_slot([&](i32 slot, i32, i32, float& x) { x = arch::exp2(x * scale - lse[slot]); });
    if constexpr (C::grad_keys)
      arch::multiply<E, OutRows::steps, C::scores_ahead>(
          gradients, [&](i32 i, i32 k) { return rows.grad_out.left(Scores::first_row() + i * 16, k); },
          [&](i32 j, i32 k) { return m.values.right(Scores::first_column() + j * 16, k); });
    const i32 keys_end = b.first + C::block_n;
    if (!mask.whole(t.row, keys_end) || keys_end > p.seq_kv || any_coarse(lse)) {
      const i32 limit = mask.limit(t.row, b.first), keys = (i32)b.keys;
      weights.each_slot(
          [&](i32, i32 row, i32 column, float& x) { x = corrected(x, column >= keys || column - row > limit); });
    }
    if constexpr (C::grad_values) weights.put_operands(m.weights, 1.0f);
    if constexpr (C::grad_keys) {
      const float unit = of_query.grad_out.out() * of_keys.v.out();
      gradients.each_with(weights, [&](i32 slot, float& x, float weight) { x = weight * (x * unit - delta[slot]); });
      gradients.put_operands(m.gradients, of_query.gradients.in);
    }
  }

  template <class In>
  static METHOD void add_grad_query(In& m, Tiles const& t, float unit, P const& p) {
    GradQueries sums;
    sums.clear();
    arch::multiply_wide<E, C::block_n / arch::step, C::sums_ahead>(
        sums, [&](i32 i, i32 k) { return m.gradients.left(GradQueries::first_row() + i * 16, k); },
        [&](i32 j, i32 k) { return m.keys.right_by_rows(k * arch::step, GradQueries::first_column() + j * 16); }, unit);
    arch::accumulate(sums, Row::grad_query(t.data_row(p), p), Row::ld);
  }

  static METHOD void finish(Memory& memory, KeyBlock const& b, GradKeys& grad_k, GradValues& grad_v, P const& p) {
    auto& m = memory.out;
    if constexpr (C::grad_keys) grad_k.put(m.grad_k, [&](i32) { return p.scale; });
    if constexpr (C::grad_values) grad_v.put(m.grad_v, [](i32) { return 1.0f; });
    ptx::sync_block();
    if constexpr (C::grad_keys)
      m.grad_k.template store_rows<threads>(
          rows_view(p.grad_k, b.batch, p.grad_k_batch, b.head_kv, p.grad_k_head, b.first, p.grad_k_row, 1), b.keys);
    if constexpr (C::grad_values)
      m.grad_v.template store_rows<threads>(
          rows_view(p.grad_v, b.batch, p.grad_v_batch, b.head_kv, p.grad_v_head, b.first, p.grad_v_row, 1), b.keys);
  }
};

}  // namespace attn
