// Copies of boxes of a tensor between global and shared memory by the copy engine (PTX: cp.async.bulk.tensor). A
// TensorMap (jitattn/params.py) says where the tensor is and how large its boxes are; coordinates count elements from
// the innermost dimension on. In shared memory a box lies row after row with 128-byte swizzle, aligned to 1024: of the
// address of each 16 bytes, bits 4 to 6 are xored with bits 7 to 9. What lies outside of the tensor reads as zeros and
// is not written.
#pragma once
#include "ptx.h"

namespace ptx {

FN void prefetch_tensormap(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// The bytes of the whole box arrive at the mbarrier.
FN void tma_load(u32 to, const TensorMap& map, u32 barrier, i32 x, i32 y, i32 z, i32 w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// `bytes` that lie one after the other, a multiple of 16 like both addresses.
FN void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// This thread's stores since the last commit are a group. The shared memory that they read is free again when
// `tma_stores_wait` returns, with at most `pending` groups still reading.
FN void tma_store(const TensorMap& map, u32 from, i32 x, i32 y, i32 z, i32 w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
FN void tma_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <i32 pending>
FN void tma_stores_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

}  // namespace ptx
