// How functions are marked.
#pragma once

#define FN __device__ __forceinline__
#define METHOD __device__ __forceinline__

#define INFINITE_FLOAT __builtin_bit_cast(float, 0x7f800000)
