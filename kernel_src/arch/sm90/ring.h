// Stages of shared memory that copies fill and warps empty, round and round.
#pragma once
#include "mbarrier.h"

namespace arch {

// What a copy brought is there, and what it brought is used no more: an mbarrier each.
struct Turnover {
  alignas(8) char full_[8];
  alignas(8) char free_[8];

  METHOD u32 full() const { return ptx::shared_address(full_); }
  METHOD u32 free() const { return ptx::shared_address(free_); }
  // `users` arrivals free it.
  METHOD void init(u32 users) {
    ptx::mbarrier_init(full(), 1);
    ptx::mbarrier_init(free(), users);
  }
  // `round` counts how often it was filled before.
  METHOD void wait_full(u32 round) const { ptx::mbarrier_wait_parity(full(), round % 2); }
  METHOD void wait_free(u32 round) const { ptx::mbarrier_wait_parity(free(), (round + 1) % 2); }
  METHOD void expect(u32 bytes) { ptx::mbarrier_arrive_expect_tx(full(), bytes); }
  METHOD void leave() { ptx::mbarrier_arrive(free()); }
};

// Which of `stages` is next, and in which round.
template <i32 stages>
struct Position {
  i32 stage = 0;
  u32 round = 0;
  METHOD void next() {
    if (++stage == stages) stage = 0, ++round;
  }
};

// After `count` steps.
template <i32 stages>
METHOD Position<stages> position(u32 count) {
  return {(i32)(count % stages), count / stages};
}

}  // namespace arch
