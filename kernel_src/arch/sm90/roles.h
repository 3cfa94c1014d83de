// Warpgroups in two roles: the first `groups` compute, the last one brings what they need and hands them registers.
#pragma once
#include "base/math.h"
#include "cluster.h"
#include "mbarrier.h"
#include "tile.h"

namespace arch {

template <i32 groups, i32 blocks_per_unit>
struct Roles {
  static constexpr i32 threads = 128 * (groups + 1);
  // Registers are handed out in eights; a thread begins with an even share of all 2^16.
  static constexpr i32 even = base::least(65536 / blocks_per_unit / threads, 255) / 8 * 8;
  static constexpr i32 bringing = groups == 3 ? 32 : 24;
  static constexpr i32 computing = base::least((even * (groups + 1) - bringing) / groups, 255) / 8 * 8;

  // Which warpgroup a thread is in, known to be the same for all of a warp.
  static METHOD i32 group() { return (i32)ptx::shuffle(ptx::thread_index() / 128, 0); }

  // The one thread that brings does so, the others compute.
  template <class Bring, class Compute>
  static METHOD void split(Bring bring, Compute compute) {
    split(bring, [](i32) {}, compute);
  }
  // The same with help(0), help(1) and help(2) by a thread each of the other warps of the warpgroup that brings.
  template <class Bring, class Help, class Compute>
  static METHOD void split(Bring bring, Help help, Compute compute) {
    const i32 mine = group();
    if (mine == groups) {
      ptx::setmaxnreg_dec<bringing>();
      if (ptx::thread_index() == 128 * groups) bring();
      if (ptx::thread_index() % 32 == 0 && ptx::thread_index() > 128 * groups)
        help((i32)ptx::thread_index() / 32 - 4 * groups - 1);
    } else {
      ptx::setmaxnreg_inc<computing>();
      compute(mine);
    }
  }
};

// Blocks that run together, or one alone.
template <i32 size>
struct Cluster {
  // What one thread of each block made ready in shared memory is there for all afterwards; returns the block's rank.
  static METHOD u32 begin() {
    if constexpr (size == 1) {
      ptx::sync_block();
      return 0;
    } else {
      ptx::sync_cluster();
      return ptx::cluster_rank();
    }
  }
  // Nobody uses another block's memory afterwards.
  static METHOD void end() {
    if constexpr (size == 1) return;
    ptx::sync_warp();
    ptx::sync_cluster();
  }
};

// One of two types.
template <bool first, class A, class B>
struct Either {
  using Type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using Type = B;
};

// Four warps down, as a warpgroup has its rows, and each warpgroup for itself.
struct EachWarpgroup {
  static constexpr i32 down = 4, across = 1;
  static METHOD i32 row_part() { return warp() % 4; }
  static METHOD i32 column_part() { return 0; }
};

// Four warps down, as a warpgroup has its rows, and warpgroups side by side.
template <i32 across_>
struct WarpgroupsAcross {
  static constexpr i32 down = 4, across = across_;
  static METHOD i32 row_part() { return warp() % 4; }
  static METHOD i32 column_part() { return warp() / 4; }
};

}  // namespace arch
