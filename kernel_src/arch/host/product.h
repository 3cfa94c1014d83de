// Matrix products over "words": a word is what one multiply-add step takes from an operand, four bytes wide. It is one
// float32, or a pair of bfloat16 adjacent along the contraction where the CPU multiplies such pairs (AVX512_BF16).
// Everything above this file is the same for both.
#pragma once
#include "convert.h"

namespace arch {

// The block of sums that a product keeps in registers: 6 x 4 vectors of 32 (AVX-512, NEON), 6 x 2 of 16 (AVX2, SSE).
constexpr i32 block_rows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr i32 block_vectors = 4;
#else
constexpr i32 block_vectors = 2;
#endif

template <class T, bool bf16_dot>
struct Operand {  // float32 words, whatever the tensor's type
  using Word = float;
  using Vector = Value;
  static constexpr i32 per_word = 1;
  static constexpr u32 signs = 0x80000000u;
  static METHOD Vector broadcast(Word x) { return splat(x); }
  static METHOD Value multiply_add(Value sum, Vector a, Vector b) { return sum + a * b; }
};

template <>
struct Operand<bf16, true> {
  using Word = u32;
  using Vector = Bits;
  static constexpr i32 per_word = 2;
  static constexpr u32 signs = 0x80008000u;
  static METHOD Vector broadcast(Word x) { return x - Bits{}; }
  static METHOD Value multiply_add(Value sum, Vector a, Vector b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
    return sum;
  }
};

// What the sums in memory start from: nothing, themselves, or themselves times a factor for each row; or nothing, and
// what `top` has for each column is raised to the largest sum there.
enum class Start { zero, same, scaled, zero_and_top };

// c[rows][vectors * lanes] = start + a b, summed apart from what it is added to (so that rounding grows with the length
// of a tile, not of the sequence), with `depth` words along the contraction. a holds row i's word w at a[i * lda + w],
// or, transposed, at a[w * lda + i]; b holds word w of column j at b[w * ldb + j].
template <class Op, i32 rows, i32 vectors, bool a_transposed, Start start>
LEAF void product_block(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb,
                        i32 depth, const float* factor, Value* top) {
  Value sum[rows][vectors] = {};
  for (i32 w = 0; w < depth; ++w) {
    typename Op::Vector column[vectors];
#pragma GCC unroll 4
    for (i32 j = 0; j < vectors; ++j) column[j] = *(const typename Op::Vector*)(b + w * ldb + j * lanes);
#pragma GCC unroll 16
    for (i32 i = 0; i < rows; ++i) {
      const auto row = Op::broadcast(a_transposed ? a[w * lda + i] : a[i * lda + w]);
#pragma GCC unroll 4
      for (i32 j = 0; j < vectors; ++j) sum[i][j] = Op::multiply_add(sum[i][j], row, column[j]);
    }
  }
#pragma GCC unroll 16
  for (i32 i = 0; i < rows; ++i)
#pragma GCC unroll 4
    for (i32 j = 0; j < vectors; ++j) {
      Value& to = *(Value*)(c + i * ldc + j * lanes);
      if constexpr (start == Start::same) sum[i][j] += to;
      if constexpr (start == Start::scaled) sum[i][j] += to * factor[i];
      to = sum[i][j];
    }
  if constexpr (start == Start::zero_and_top) {
#pragma GCC unroll 16
    for (i32 i = 1; i < rows; ++i)
#pragma GCC unroll 4
      for (i32 j = 0; j < vectors; ++j) sum[0][j] = max(sum[0][j], sum[i][j]);
#pragma GCC unroll 4
    for (i32 j = 0; j < vectors; ++j) top[j] = max(top[j], sum[0][j]);
  }
}

template <i32 n>
struct Count {
  static constexpr i32 value = n;
};

template <class Op, i32 vectors, bool a_transposed, Start start>
FN void product_column(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb,
                       i32 rows, i32 depth, const float* factor, Value* top) {
  i32 i = 0;
  const auto blocks = [&](auto height) {
    for (; i + height.value <= rows; i += height.value)
      product_block<Op, height.value, vectors, a_transposed, start>(c + i * ldc, ldc, a + i * (a_transposed ? 1 : lda),
                                                                    lda, b, ldb, depth, factor + i, top);
  };
  blocks(Count<block_rows>{});
  if constexpr (a_transposed) {  // rows come in pairs there, elsewhere in whole blocks
    blocks(Count<4>{});
    blocks(Count<2>{});
  }
}

// The whole product, `vectors` wide: known when compiled, or else (0) given as `width`.
template <class Op, i32 vectors, bool a_transposed, Start start>
FN void product(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb, i32 rows,
                i32 width, i32 depth, const float* factor = nullptr, Value* top = nullptr) {
  i32 j = 0;
  const auto column = [&](auto wide) {
    product_column<Op, wide.value, a_transposed, start>(c + j * lanes, ldc, a, lda, b + j * lanes, ldb, rows, depth,
                                                        factor, top + j);
    j += wide.value;
  };
  if constexpr (vectors == 0 || vectors >= block_vectors)
    while (j + block_vectors <= (vectors ? vectors : width)) column(Count<block_vectors>{});
  if constexpr (vectors == 0)
    while (j < width) column(Count<1>{});
  else if constexpr (vectors % block_vectors != 0)
    column(Count<vectors % block_vectors>{});
}

}  // namespace arch
