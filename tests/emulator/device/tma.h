// The functions of kernel_src/arch/sm90/tma.h, which says what each does, on the emulator.
#pragma once
#include "ptx.h"

namespace ptx {

FN void prefetch_tensormap(const TensorMap& map) { emulator::prefetch_tensormap(&map); }
FN void tma_load(u32 to, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, i32 w) {
  emulator::tma_load(to, &map, barrier, x, y, z, w);
}
FN void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) { emulator::bulk_load(to, from, bytes, barrier); }
FN void tma_store(const TensorMap& map, u32 from, i32 x, i32 y, i32 z, i32 w) {
  emulator::tma_store(&map, from, x, y, z, w);
}
FN void tma_stores_commit() { emulator::tma_stores_commit(); }
template <i32 pending>
FN void tma_stores_wait() {
  emulator::tma_stores_wait(pending);
}

}  // namespace ptx
