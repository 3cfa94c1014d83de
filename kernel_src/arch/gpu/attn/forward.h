// Forward attention as a GPU runs it: a block of threads holds a block of query rows, and tiles of keys and values pass
// through shared memory while it computes (FlashAttention-2's order). See attn/forward.h for the formulas.
#pragma once
#include "attn/layout.h"
#include "attn/magnitude.h"
#include "attn/mask.h"
#include "attn/only.h"
#include "attn/workspace.h"
#include "attn/schedule.h"
#include "attn/softmax.h"
#include "tile.h"

namespace attn {

template <class C, class P>
struct Forward {
  using E = typename C::Element;
  static constexpr i32 threads = 32 * C::warps;
  using QueryRows = arch::SharedRows<E, C::block_m, C::head_dim, arch::columns<C>(C::head_dim)>;
  using KeyRows = arch::SharedRows<E, C::block_n, C::head_dim, arch::columns<C>(C::head_dim)>;
  using ValueRows = arch::SharedRows<E, C::block_n, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using OutRows = arch::SharedRows<E, C::block_m, C::head_dim_v, arch::columns<C>(C::head_dim_v)>;
  using Scores = arch::Scores<C>;
  using Sums = arch::Matrix<arch::Warps<C::warps / C::across, C::across>, C::block_m, arch::columns<C>(C::head_dim_v)>;
  using PerRow = arch::PerRow<C, float>;

  // Warps that share rows of scores share their weights too, and agree about each row's largest score.
  static constexpr bool shares_rows = C::across > 1;
  static_assert(!shares_rows || C::stages == 1, "what warps share is handed over where a tile's values arrive");
  struct Shared {
    arch::SharedRows<E, C::block_m, C::block_n> weights;
    arch::RowExchange<C> rows;
  };

  union Memory {
    struct : Only<shares_rows, Shared> {
      QueryRows query;
      KeyRows keys[C::stages];
      ValueRows values[C::stages];
    } in;
    OutRows out;
  };

  static METHOD void run(i32 block, Memory& memory, P const& p) {
    const QueryBlock b = query_block<C>(block, p, C::split ? (u32)p.splits : 1);
    const Mask<C, P, i32> mask(p);
    const KeyRange range = key_range(b, mask, p);
    const auto k = rows_view(p.k, b.batch, p.k_batch, b.head_kv, p.k_head, 0, p.k_row, p.k_dim);
    const auto v = rows_view(p.v, b.batch, p.v_batch, b.head_kv, p.v_head, 0, p.v_row, p.v_dim);
    const auto fetch_keys = [&](i32 key, i32 stage) {
      memory.in.keys[stage].template fetch_rows<threads, C::vector>(k.from(key), keys_left(key, p));
    };
    const auto fetch_values = [&](i32 key, i32 stage) {
      memory.in.values[stage].template fetch_rows<threads, C::vector>(v.from(key), keys_left(key, p));
    };

    using Heads = Magnitudes<C, P, false>;
    const i64 head = (i64)b.batch * p.heads_q + b.head, head_kv = (i64)b.batch * p.heads_kv + b.head_kv;
    const Power of_q = Heads::power(Heads::q(p) + head, p);
    const Power of_k = Heads::power(Heads::k(p) + head_kv, p), of_v = Heads::power(Heads::v(p) + head_kv, p);
    const auto keys_arrive = [&](i32 stage) { memory.in.keys[stage].template make_operands<threads>(of_k.in); };
    const auto values_arrive = [&](i32 stage) { memory.in.values[stage].template make_operands<threads>(of_v.in); };

    Sums sums;
    OnlineSoftmax<C> softmax;
    Scaling scaling(p.scale * of_q.out() * of_k.out());
    if constexpr (Heads::needed) scaling.early = scaling.scale > 0x1p26f / (C::head_dim * 0x1p30f);  // products' bound
    const auto multiply_keys = [&](Scores& scores, i32 stage) {
      scores.clear();
      arch::multiply<E, QueryRows::steps, C::scores_ahead>(
          scores, [&](i32 i, i32 step) { return memory.in.query.left(Scores::first_row() + i * 16, step); },
          [&](i32 j, i32 step) { return memory.in.keys[stage].right(Scores::first_column() + j * 16, step); });
    };
    // Products -> scores, and the largest of each row.
    const auto look = [&](Scores& scores, i32 key) {
      if (!mask.whole(b.first + Scores::first_row(), key + C::block_n) || key + C::block_n > p.seq_kv ||
          scaling.early) {
        const i32 limit = mask.limit(b.first, key), keys = keys_left(key, p);
        const float scale = scaling.of_products();
        scores.each_slot([&](i32, i32 row, i32 column, float& x) {
          x = column >= keys || column - row > limit ? -base::infinity : x * scale;
        });
      }
      auto best = softmax.look(scores);
      if constexpr (shares_rows) memory.in.rows.put([&](i32 slot) { return best.slot[slot].top; });
      return best;
    };
    // Scores -> weights -> their part of the sums.
    const auto add_values = [&](Scores& scores, auto& best, i32 stage) {
      if constexpr (shares_rows)
        memory.in.rows.take([&](i32 slot, float top) { best.slot[slot].top = arch::max(best.slot[slot].top, top); });
      const PerRow factor = softmax.raise(best, scaling.of_scores());
      // Factors other than 1 are rare. Looking first pays where a warp's sums are many for its scores.
      if (!C::look_first || arch::any_changes(factor)) sums.each(factor, [](float f, i32, i32, float& x) { x *= f; });
      softmax.weigh(scores, scaling.of_scores());
      if constexpr (shares_rows) {
        scores.put_operands(memory.in.weights, 1.0f);
        ptx::sync_some(1 + arch::warp() / C::across, 32 * C::across);
      }
      arch::multiply_wide<E, C::block_n / arch::step, C::sums_ahead>(
          sums,
          [&](i32 i, i32 step) {
            if constexpr (shares_rows)
              return memory.in.weights.left(Sums::first_row() + i * 16, step);
            else
              return scores.template left<E>(i, step);
          },
          [&](i32 j, i32 step) {
            return memory.in.values[stage].right_by_rows(step * arch::step, Sums::first_column() + j * 16);
          });
    };

    sums.clear();
    softmax.start();
    if (range.first < range.end) {
      const auto q = rows_view(p.q, b.batch, p.q_batch, b.head, p.q_head, b.first, p.q_row, p.q_dim);
      memory.in.query.template fetch_rows<threads, C::vector>(q, (i32)b.rows);
      fetch_keys(range.first, 0);
      arch::fetches_commit();
      fetch_values(range.first, 0);
      arch::arrive<1>([&] {
        memory.in.query.template make_operands<threads>(of_q.in);
        keys_arrive(0);
      });
      if (p.scale < 0.0f) {
        memory.in.query.template negate<threads>();
        ptx::sync_block();
      }
    }
    i32 stage = 0;
    for (i32 key = range.first; key < range.end; key += C::block_n) {
      const i32 next = key + C::block_n, next_stage = C::stages == 1 ? 0 : 1 - stage;
      const bool more = next < range.end;
      Scores scores;
      arch::PerRow<C, typename OnlineSoftmax<C>::Best> best;
      if constexpr (C::stages == 1) {
        // Keys arrive during the sum over the values before them, values during the product with their keys.
        multiply_keys(scores, stage);
        if constexpr (shares_rows) best = look(scores, key);
        arch::arrive([&] { values_arrive(stage); });
        if (more) fetch_keys(next, next_stage);
      } else {
        // Keys and values arrive a whole tile ahead.
        if (more) fetch_keys(next, next_stage), fetch_values(next, next_stage);
        multiply_keys(scores, stage);
        if (key == range.first) arch::arrive<1>([&] { values_arrive(stage); });
      }
      if constexpr (!shares_rows) best = look(scores, key);
      add_values(scores, best, stage);
      arch::arrive([&] {
        if (!more) return;
        keys_arrive(next_stage);
        if (C::stages > 1) values_arrive(next_stage);
      });
      if (C::stages == 1 && more) fetch_values(next, next_stage);
      stage = next_stage;
    }
    finish(memory, b, sums, of_v.out(), softmax, p);
  }

 private:
  struct KeyRange {
    i32 first, end;
  };

  // The keys of this block's split that some of its rows see, from the first of a tile on.
  static METHOD KeyRange key_range(QueryBlock const& b, Mask<C, P, i32> const& mask, P const& p) {
    const i32 end = mask.keys_end(b.first, b.rows);
    if constexpr (!C::split) return {0, end};
    const i32 tiles = base::ceil_div((i32)p.seq_kv, C::block_n);
    const i32 keys = base::ceil_div(tiles, (i32)p.splits) * C::block_n;
    return {b.split * keys, base::least(end, (b.split + 1) * keys)};
  }

  static METHOD i32 keys_left(i32 key, P const& p) { return base::least(C::block_n, (i32)p.seq_kv - key); }

  static METHOD void finish(Memory& memory, QueryBlock const& b, Sums& sums, float unit, OnlineSoftmax<C>& softmax,
                            P const& p) {
    softmax.gather();
    if constexpr (shares_rows) {
      memory.in.rows.put([&](i32 slot) { return softmax.rows.slot[slot].total; });
      ptx::sync_block();
      memory.in.rows.take([&](i32 slot, float total) { softmax.rows.slot[slot].total += total; });
      ptx::sync_block();
    }
    PerRow lse;
    PerRow inverse = softmax.finish(lse);
    for (float& x : inverse.slot) x *= unit;
    if constexpr (C::split) {
      using Partial = PartialOut<C, P>;
      const i64 row = Partial::row(b, p);
      float* to = Partial::out(b.split, row, p);
      sums.each(inverse, [&](float f, i32 row, i32 column, float& x) {
        if (row < b.rows) to[(i64)row * Partial::ld + column] = x * f;
      });
      arch::store_per_row<C>(Partial::lse(b.split, row, p), lse, (i32)b.rows);
      return;
    }
    sums.put(memory.out, [&](i32 slot) { return inverse.slot[slot]; });
    ptx::sync_block();
    const auto out = rows_view(p.out, b.batch, p.out_batch, b.head, p.out_head, b.first, p.out_row, 1);
    memory.out.template store_rows<threads>(out, (i32)b.rows);
    arch::store_per_row<C>(p.lse + ((i64)b.batch * p.heads_q + b.head) * p.seq_q + b.first, lse, (i32)b.rows);
  }
};

}  // namespace attn
