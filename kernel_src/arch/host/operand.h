// Rows of a tensor in memory -> operands of a product: contiguous, converted to words, zero beyond the tensor's rows
// and head dim (so that no NaN or garbage from there can reach a sum). Rows that are all that already are used in
// place, everything else is copied to scratch memory.
#pragma once
#include "product.h"
#include "attn/layout.h"

namespace arch {

// Elements d .. d + lanes - 1 of a row of `size`, as float32; 0 beyond the row.
template <i32 size, class T>
FN Value row_floats(const T* row, i64 step, i32 d) {
  if (d + lanes <= size && step == 1) return load(row + d);
  alignas(64) T part[lanes] = {};
  for (i32 i = 0; i < lanes && d + i < size; ++i) part[i] = row[(d + i) * step];
  return load(part);
}

// Words w .. w + lanes - 1 of a row.
template <class Op, i32 size, class T>
FN typename Op::Vector row_words(const T* row, i64 step, i32 w) {
  if constexpr (Op::per_word == 1) {
    return row_floats<size>(row, step, w);
  } else {
    if (2 * (w + lanes) <= size && step == 1) return *(const UnalignedBits*)(row + 2 * w);
    alignas(64) T part[2 * lanes] = {};
    for (i32 i = 0; i < 2 * lanes && 2 * w + i < size; ++i) part[i] = row[(2 * w + i) * step];
    return *(const Bits*)part;
  }
}

// Rows that will be needed after the work at hand: bring them near while it goes on.
template <i32 size, class T>
FN void expect_rows(attn::RowsView<T> source, i64 count) {
  constexpr i64 line = 64 / sizeof(T);
  if (source.step != 1) return;
  for (i64 i = 0; i < count; ++i)
    for (i64 d = 0; d < size; d += line) __builtin_prefetch(source.row(i) + d, 1, 2);
}

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Whether rows of `size` elements in memory are the words of `Op` as they stand.
template <class Op, i32 size, class T>
constexpr bool are_words =
    Op::per_word == 1 ? is_same<T, float> && size % lanes == 0 : is_same<T, bf16> && size % (2 * lanes) == 0;

template <i32 size, class T>
FN bool is_packed(attn::RowsView<T> source) {
  return source.step == 1 && source.stride == size && (unsigned long long)source.data % (4 * lanes) == 0;
}

// Rows contracted along their elements; the side whose words are broadcast. [rows][words]
template <class Op, i32 capacity, i32 size>
struct BroadcastRows {
  using Word = typename Op::Word;
  static constexpr i32 depth = base::ceil_div(size, Op::per_word);
  static constexpr i32 ld = base::round_up(depth, lanes);
  alignas(64) Word copy[base::round_up(capacity, block_rows) * ld];
  const Word* words;

  template <class T>
  METHOD void load_rows(attn::RowsView<T> source, i32 count) {
    if constexpr (are_words<Op, size, T>)
      if (is_packed<size>(source) && count % block_rows == 0) {
        words = (const Word*)source.data;
        return;
      }
    words = copy;
    for (i32 i = 0; i < base::round_up(count, block_rows); ++i)
      for (i32 w = 0; w < ld; w += lanes)
        *(typename Op::Vector*)(copy + i * ld + w) =
            i < count ? row_words<Op, size>(source.row(i), source.step, w) : typename Op::Vector{};
  }
};

// Rows contracted along their elements; the side whose words fill vectors, so it is stored transposed. [words][rows]
template <class Op, i32 capacity, i32 size>
struct VectorRows {
  static constexpr i32 depth = base::ceil_div(size, Op::per_word);
  static constexpr i32 ld = capacity;
  static_assert(capacity % lanes == 0);
  alignas(64) typename Op::Word words[base::round_up(depth, lanes) * ld];

  template <class T>
  METHOD void load_rows(attn::RowsView<T> source, i32 count) {
    for (i32 i = 0; i < count; i += lanes)
      for (i32 w = 0; w < depth; w += lanes) {
        typename Op::Vector block[lanes];
        for (i32 r = 0; r < lanes; ++r)
          block[r] = i + r < count ? row_words<Op, size>(source.row(i + r), source.step, w) : typename Op::Vector{};
        transpose(block);
#pragma GCC unroll 16
        for (i32 r = 0; r < lanes; ++r) *(typename Op::Vector*)(words + (w + r) * ld + i) = block[r];
      }
  }
  METHOD void negate() {
    for (i32 i = 0; i < depth * ld; i += lanes) *(Bits*)(words + i) ^= Op::signs;
  }
};

// Rows contracted over the rows themselves (they are summed with weights). [rows / per_word][elements]
template <class Op, i32 capacity, i32 size>
struct SummedRows {
  using Word = typename Op::Word;
  static constexpr i32 vectors = base::ceil_div(size, lanes);
  static constexpr i32 ld = vectors * lanes;
  alignas(64) Word copy[base::ceil_div(capacity, Op::per_word) * ld];
  const Word* words;

  template <class T>
  METHOD void load_rows(attn::RowsView<T> source, i32 count) {
    if constexpr (Op::per_word == 1 && are_words<Op, size, T>)
      if (is_packed<size>(source)) {
        words = source.data;
        return;
      }
    words = copy;
    if constexpr (Op::per_word == 1)
      for (i32 i = 0; i < count; ++i)
        for (i32 w = 0; w < ld; w += lanes)
          *(Value*)(copy + i * ld + w) = row_words<Op, size>(source.row(i), source.step, w);
    else
      for (i32 i = 0; i < count; i += 2)
        for (i32 w = 0; w < base::ceil_div(size, 2); w += lanes) load_pair(source, i, count, w);
  }

 private:
  // Words w .. w + lanes - 1 of rows i and i + 1 -> twice as many words, each of one column's two elements.
  template <class T>
  METHOD void load_pair(attn::RowsView<T> source, i32 i, i32 count, i32 w) {
    using Order = typename Range<lanes>::type;
    const Bits upper = row_words<Op, size>(source.row(i), source.step, w);
    const Bits lower = i + 1 < count ? row_words<Op, size>(source.row(i + 1), source.step, w) : Bits{};
    const Bits even = (upper & 0xffffu) | lower << 16, odd = upper >> 16 | (lower & 0xffff0000u);
    Word* to = copy + i / 2 * ld + 2 * w;
    *(Bits*)to = interleave_low(even, odd, Order{});
    if (2 * w + lanes < ld) *(Bits*)(to + lanes) = interleave_high(even, odd, Order{});
  }
};

}  // namespace arch
