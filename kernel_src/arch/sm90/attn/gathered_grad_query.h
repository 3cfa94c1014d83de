// dQ of a tile of query rows takes the gradients of scores of all keys at hand: those of all warpgroups of a block, and
// where two blocks with neighbouring keys are a cluster, those of the other block, which its copy engine sends. Each
// block then forms dQ of both for half of the head dim, so that half as much is added to dQ in all. dQ of a tile is
// formed when the next one is under way and its gradients have long been there. It is complete, and stored, where these
// are all keys that there are (C::complete); otherwise it is added to sums in the workspace, in the order of the keys
// where the sums must be the same every time (C::ordered).
#pragma once
#include "accumulate.h"
#include "attn/backward_rows.h"
#include "attn/tiles.h"
#include "cluster.h"
#include "roles.h"
#include "store.h"
#include "turns.h"

namespace attn {

// Warpgroups share the columns of what a block forms, `across` of them, or the rows.
template <class C, class P, i32 groups, i32 across>
struct GatheredGradQuery {
  using E = typename C::Element;
  static constexpr bool paired = C::cluster == 2;
  static constexpr i32 width = base::round_up(C::head_dim, 64);
  // Columns of a block, and of a warpgroup.
  static constexpr i32 of_block = !paired ? width : width == 64 ? 32 : base::round_up(width / 2, 64);
  static constexpr i32 of_group = of_block / across;
  static_assert(across == groups ? C::block_m == 64 : across == 1 && C::block_m == groups * 64, "");

  using KeyRows = arch::BoxedRows<E, C::block_n, C::head_dim>;
  using FarKeyRows = arch::BoxedRows<E, C::block_n, of_block>;
  using GradientRows = arch::BoxedRows<E, C::block_n, C::block_m>;
  using Sums = arch::Matrix<arch::EachWarpgroup, 64, of_group>;
  using Row = RowData<C, P>;
  using At = arch::Position<2>;

  struct OwnMemory {
    GradientRows gradients[2];
  };
  struct PairMemory : OwnMemory {
    FarKeyRows far_keys[C::key_stages];
    GradientRows far_gradients[2];
  };
  using Memory = typename arch::Either<paired, PairMemory, OwnMemory>::Type;
  struct Turns {
    arch::Turnover own[2], far[2];
    // Where sums are added in order: it is this block's turn, it has added, it has passed the turn on.
    arch::Turnover here[2], added[2], passed[2];

    // `writers` threads put gradients there. All of this block's use them, and a lane of each of the other one's warps
    // tells of its.
    METHOD void init(u32 writers) {
      for (i32 i = 0; i < 2; ++i) {
        ptx::mbarrier_init(own[i].full(), writers);
        if constexpr (paired) {
          ptx::mbarrier_init(own[i].free(), 128 * groups + 4 * groups);
          ptx::mbarrier_init(far[i].full(), 1);
        }
        if constexpr (C::ordered) {
          ptx::mbarrier_init(here[i].full(), 1);
          ptx::mbarrier_init(added[i].full(), 128 * groups);
          ptx::mbarrier_init(passed[i].full(), 1);
        }
      }
    }
    // Without another block the gradients before these have been used by all warpgroups whose present ones are there.
    METHOD void wait_free(At const& at) const {
      if constexpr (paired) ptx::mbarrier_wait_parity_far(own[at.stage].free(), (at.round + 1) % 2);
    }
    // To the other block, which sends its own. Who puts gradients here has waited until both blocks are done with those
    // before; when the other one's are there, so are this block's.
    METHOD void send(Memory& m, At const& at, u32 rank) {
      if constexpr (paired) {
        own[at.stage].wait_full(at.round);
        far[at.stage].expect(GradientRows::bytes);
        ptx::bulk_copy_far(ptx::far_address(m.far_gradients[at.stage].address(), 1 - rank),
                           m.gradients[at.stage].address(), GradientRows::bytes,
                           ptx::far_address(far[at.stage].full(), 1 - rank));
      }
    }
    // Turns are waited for and passed on by threads of their own: both take long.
    METHOD void wait_for_turn(At const& at, u32 nth_keys, i64 row, u32 rank, P const& p) {
      ptx::mbarrier_wait_parity(passed[at.stage].full(), (at.round + 1) % 2);
      ptx::wait_global(Row::turn(row + rank, p), nth_keys);
      ptx::mbarrier_arrive(here[at.stage].full());
    }
    METHOD void pass_turn(At const& at, i64 row, u32 rank, P const& p) {
      added[at.stage].wait_full(at.round);
      ptx::add_release_global(Row::turn(row + rank, p), 1);
      ptx::mbarrier_arrive(passed[at.stage].full());
    }
  };

  // What the other warps of the warpgroup that brings do, each for all tiles of all blocks of keys.
  static METHOD void help(i32 helper, Memory& m, Turns& turns, u32 rank, P const& p) {
    if (paired && helper == 0) each_tile(p, [&](At const& at, u32, i64) { turns.send(m, at, rank); });
    if (C::ordered && helper == 1)
      each_tile(p, [&](At const& at, u32 nth, i64 row) { turns.wait_for_turn(at, nth, row, rank, p); });
    if (C::ordered && helper == 2) each_tile(p, [&](At const& at, u32, i64 row) { turns.pass_turn(at, row, rank, p); });
  }

  // Of the other block's keys those columns are wanted that this block forms: bytes that will arrive at an mbarrier.
  static constexpr u32 far_bytes = paired ? FarKeyRows::bytes : 0;
  static METHOD void fetch_far_keys(Memory& m, i32 stage, u32 full, KeyBlock const& both, u32 rank, P const& p) {
    if constexpr (paired)
      m.far_keys[stage].fetch(p.k_map, full, of_block_in(both, 1 - rank).first, both.head_kv, both.batch,
                              first_column(rank) / 64 * 64);
  }
  // The keys of the block of that rank.
  static METHOD KeyBlock of_block_in(KeyBlock const& cluster, u32 rank) {
    KeyBlock own = cluster;
    own.first += (i32)rank * C::block_n;
    own.keys -= (i32)rank * C::block_n;  // none, if negative
    return own;
  }

  METHOD GatheredGradQuery(Memory& memory, Turns& turns, i32 group, u32 rank)
      : m(memory),
        turns(turns),
        rank(rank),
        first_row(across == 1 ? group * 64 : 0),
        column(first_column(rank) + (across == 1 ? 0 : group * of_group)) {}

  // Keys are there.
  METHOD void begin_keys(KeyRows const& own, i32 stage) {
    // Where the head dim ends before, columns that nobody takes.
    keys = place_of(own, base::least(column, width - of_group));
    if constexpr (paired) far_keys = place_of(m.far_keys[stage], column - first_column(rank) / 64 * 64);
    before = -1;
  }
  // Begins to form dQ of the tile before; while there is none, products are of something and wasted.
  METHOD void multiply() {
    const u64 keys = ptx::swizzled(ptx::here_and_now(this->keys), KeyRows::box_bytes);
    u64 gradients = ptx::swizzled(this->keys / 1024 * 1024), far_gradients = gradients;
    if (before >= 0) {
      (paired ? turns.far : turns.own)[at.stage].wait_full(at.round);
      gradients = m.gradients[at.stage].columns_from(first_row);
      if constexpr (paired) far_gradients = m.far_gradients[at.stage].columns_from(first_row);
    }
    ptx::wgmma_fence();
    multiply<KeyRows>(gradients, keys, true);
    if constexpr (paired)
      multiply<FarKeyRows>(far_gradients, ptx::swizzled(ptx::here_and_now(far_keys), FarKeyRows::box_bytes), false);
    ptx::wgmma_commit();
  }
  // When that is done.
  METHOD void deliver(P const& p) {
    ptx::registers_change(registers());
    if (before < 0) return;
    if constexpr (paired) {
      turns.own[at.stage].leave();
      ptx::sync_warp();
      if (arch::lane() == 0) ptx::mbarrier_arrive_far(ptx::far_address(turns.own[at.stage].free(), 1 - rank));
    }
    if constexpr (C::complete) {
      const RowsView<E> to = {p.grad_q + before + first_row * p.grad_q_row + column, p.grad_q_row, 1};
      arch::store_rows<of_group>(to, rows - first_row, sums, [&](i32) { return p.scale; }, C::head_dim - column);
    } else {
      if constexpr (C::ordered) turns.here[at.stage].wait_full(at.round);
      if (column < Row::ld) arch::accumulate(sums, Row::grad_query(before + first_row, p) + column * 16, Row::ld);
      if constexpr (C::ordered) ptx::mbarrier_arrive(turns.added[at.stage].full());
    }
  }
  // `tile`, whose gradients are there, is now the one before.
  METHOD void next(RowTiles<C, P> const& tile, KeyBlock const& b, At const& next_at, P const& p) {
    at = next_at;
    if constexpr (C::complete) {
      before = b.batch * p.grad_q_batch + tile.head * p.grad_q_head + tile.row * p.grad_q_row;
      rows = (i32)p.seq_q - tile.row;
    } else {
      before = tile.data_row(b, p);
    }
  }
  METHOD void finish_keys(P const& p) {
    multiply();
    ptx::wgmma_wait<0>();
    deliver(p);
  }

 private:
  Memory& m;
  Turns& turns;
  u32 rank;
  i32 first_row, column;
  u32 keys, far_keys;
  // The tile before: where its dQ goes, counted in rows of the workspace or, if complete, in elements; it then has so
  // many rows.
  i64 before;
  i32 rows;
  At at;  // its gradients
  Sums sums;

  // use(where its gradients are, which block of keys of its head, row in the workspace)
  template <class Use>
  static METHOD void each_tile(P const& p, Use use) {
    At at;
#pragma unroll 1
    for (KeyBlocks<C, P> work(p); work.more(); ++work.done) {
      const KeyBlock b = work.block();
#pragma unroll 1
      for (RowTiles<C, P> tiles(b, Mask<C, P, i32>(p), p); tiles.more(); tiles.next(p), at.next())
        use(at, (u32)(b.first / KeyBlocks<C, P>::keys), tiles.data_row(b, p));
    }
  }
  static METHOD i32 first_column(u32 rank) { return (i32)rank * of_block; }
  template <class Rows>
  static METHOD u32 place_of(Rows const& rows, i32 column) {
    return rows.address() + column / Rows::box_columns * Rows::box_bytes + column % Rows::box_columns * (i32)sizeof(E);
  }
  template <class Rows>
  METHOD void multiply(u64 gradients, u64 of_keys, bool first) {
#pragma unroll
    for (i32 step = 0; step < C::block_n / 16; ++step)
      ptx::wgmma<true, true, true>(E{}, registers(), GradientRows::across(gradients, step), Rows::across(of_keys, step),
                                   step > 0 || !first);
  }
  METHOD auto& registers() { return reinterpret_cast<float (&)[Sums::n_tiles * 4]>(sums.at); }
};

}  // namespace attn
