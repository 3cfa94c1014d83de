// The entry point of a kernel as the emulator calls it: once for every thread, on a stack of the thread's own.
#pragma once
#include "base/types.h"
#include "ptx.h"
#include "qualifiers.h"

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

// jitattn_cluster: how many neighbouring blocks run together.
#define JITATTN_KERNEL(Algorithm, Params, cluster)                                                   \
  EMULATOR_EXPORT const int jitattn_shape[2] = {32 * Config::warps, (int)sizeof(Algorithm::Memory)}; \
  EMULATOR_EXPORT const int jitattn_cluster = cluster;                                               \
  EMULATOR_EXPORT void jitattn_kernel(const void* params, void* memory) {                            \
    const Params p = *static_cast<const Params*>(params);                                            \
    Algorithm::run((i32)ptx::block_index(), *static_cast<Algorithm::Memory*>(memory), p);            \
  }
#define JITATTN_ENTRY(Algorithm, Params) JITATTN_KERNEL(Algorithm, Params, 1)
#define JITATTN_ENTRY_OF_CLUSTERS(Algorithm, Params) JITATTN_KERNEL(Algorithm, Params, Config::cluster)
