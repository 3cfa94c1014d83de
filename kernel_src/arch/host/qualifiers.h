// How functions are marked on this architecture.
#pragma once

#define FN static inline __attribute__((always_inline))
#define METHOD inline __attribute__((always_inline))
#define KERNEL extern "C" __attribute__((visibility("default")))
// Inner products are not inlined: alone in a function, their accumulators stay in registers on every compiler.
#define LEAF static __attribute__((noinline))

// Compilers have different words for it, and none for all of them is a constant.
#define INFINITE_FLOAT __builtin_inff()
