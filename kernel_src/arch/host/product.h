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
  static METHOD Vector broadcast(Word x) { return splat(x); }
  static METHOD Value multiply_add(Value sum, Vector a, Vector b) { return sum + a * b; }
};

template <>
struct Operand<bf16, true> {
  using Word = u32;
  using Vector = Bits;
  static constexpr i32 per_word = 2;
  static METHOD Vector broadcast(Word x) { return x - Bits{}; }
  static METHOD Value multiply_add(Value sum, Vector a, Vector b) {
#if defined(__AVX512BF16__)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
    return sum;
  }
};

// What the sums in memory start from: nothing, themselves, or themselves times a factor for each row.
enum class Start { zero, same, scaled };

// c[rows][vectors * lanes] = start + a b, summed apart from what it is added to (so that rounding grows with the length
// of a tile, not of the sequence), with `depth` words along the contraction. a holds row i's word w at a[i * lda + w],
// or, transposed, at a[w * lda + i]; b holds word w of column j at b[w * ldb + j].
template <class Op, i32 rows, i32 vectors, bool a_transposed, Start start>
LEAF void product_block(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb,
                        i32 depth, const float* factor) {
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
      to = start == Start::zero ? sum[i][j] : (start == Start::same ? to : to * factor[i]) + sum[i][j];
    }
}

template <i32 n>
struct Count {
  static constexpr i32 value = n;
};

template <class Op, i32 vectors, bool a_transposed, Start start>
FN void product_column(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb,
                       i32 rows, i32 depth, const float* factor) {
  i32 i = 0;
  const auto blocks = [&](auto height) {
    for (; i + height.value <= rows; i += height.value)
      product_block<Op, height.value, vectors, a_transposed, start>(c + i * ldc, ldc, a + i * (a_transposed ? 1 : lda),
                                                                    lda, b, ldb, depth, factor + i);
  };
  blocks(Count<block_rows>{});
  if constexpr (a_transposed) blocks(Count<2>{});  // rows come in pairs there, elsewhere in whole blocks
}

// The whole product, `vectors` wide: known when compiled, or else (0) given as `width`.
template <class Op, i32 vectors, bool a_transposed, Start start>
FN void product(float* c, i64 ldc, const typename Op::Word* a, i64 lda, const typename Op::Word* b, i64 ldb, i32 rows,
                i32 width, i32 depth, const float* factor = nullptr) {
  i32 j = 0;
  const auto column = [&](auto wide) {
    product_column<Op, wide.value, a_transposed, start>(c + j * lanes, ldc, a, lda, b + j * lanes, ldb, rows, depth,
                                                        factor);
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
