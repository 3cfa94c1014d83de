// The entry point of a kernel: one block of threads runs one block of the algorithm.
#pragma once
#include "qualifiers.h"

// jitattn_shape is read from the binary before a launch: threads of a block, bytes of dynamic shared memory.
#define JITATTN_KERNEL(Algorithm, Params, attributes)                                                      \
  extern "C" __device__ const int jitattn_shape[2] = {32 * Config::warps, (int)sizeof(Algorithm::Memory)}; \
  extern "C" __global__ void attributes __launch_bounds__(32 * Config::warps, Config::blocks_per_unit)     \
      jitattn_kernel(const __grid_constant__ Params p) {                                                   \
    extern __shared__ __align__(1024) char memory[];                                                       \
    Algorithm::run((i32)ptx::block_index(), *reinterpret_cast<Algorithm::Memory*>(memory), p);             \
  }
#define JITATTN_ENTRY(Algorithm, Params) JITATTN_KERNEL(Algorithm, Params, )
// Where neighbouring blocks run together, Config::cluster of them.
#define JITATTN_ENTRY_OF_CLUSTERS(Algorithm, Params) \
  JITATTN_KERNEL(Algorithm, Params, __cluster_dims__(Config::cluster, 1, 1))
