// How functions are marked where the emulator stands in for a GPU.
#pragma once

#define FN inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))

#define INFINITE_FLOAT __builtin_inff()

// What CUDA's compilers declare by themselves.
extern "C" float fmaxf(float, float);
extern "C" float fminf(float, float);
