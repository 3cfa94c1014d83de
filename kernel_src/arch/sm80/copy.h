// Copies from global to shared memory that go on in the background.
#pragma once
#include "ptx.h"

namespace arch {

template <i32 size>
FN void fetch(u32 to, const void* from, u32 valid) {
  ptx::copy_async<size>(to, from, valid);
}
// What was fetched since the last call is a group; `fetches_wait` returns when at most `pending` groups are under way.
FN void fetches_commit() { ptx::copies_commit(); }
template <i32 pending>
FN void fetches_wait() {
  ptx::copies_wait<pending>();
}

}  // namespace arch
