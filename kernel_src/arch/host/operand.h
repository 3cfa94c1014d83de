// Rows of a tensor in memory -> operands of a product, in scratch memory: contiguous, zero beyond the tensor's rows
// and head dim (so that no NaN or garbage from there can reach a sum), converted to words.
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

// Rows contracted along their elements; the side whose words are broadcast. [rows][words]
template <class Op, i32 capacity, i32 size>
struct BroadcastRows {
  static constexpr i32 depth = base::ceil_div(size, Op::per_word);
  static constexpr i32 ld = base::round_up(depth, lanes);
  alignas(64) typename Op::Word words[base::round_up(capacity, block_rows) * ld];

  template <class T>
  METHOD void load_rows(attn::RowsView<T> source, i32 count) {
    for (i32 i = 0; i < base::round_up(count, block_rows); ++i)
      for (i32 w = 0; w < ld; w += lanes)
        *(typename Op::Vector*)(words + i * ld + w) =
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
};

// Rows contracted over the rows themselves (they are summed with weights). [rows / per_word][elements]
template <class Op, i32 capacity, i32 size>
struct SummedRows {
  static constexpr i32 vectors = base::ceil_div(size, lanes);
  static constexpr i32 ld = vectors * lanes;
  alignas(64) typename Op::Word words[base::ceil_div(capacity, Op::per_word) * ld];

  template <class T>
  METHOD void load_rows(attn::RowsView<T> source, i32 count) {
    if constexpr (Op::per_word == 1) {
      for (i32 i = 0; i < count; ++i)
        for (i32 w = 0; w < ld; w += lanes)
          *(Value*)(words + i * ld + w) = row_words<Op, size>(source.row(i), source.step, w);
    } else {
      using Order = typename Range<lanes>::type;
      for (i32 i = 0; i < count; i += 2)
        for (i32 w = 0; w < base::ceil_div(size, 2); w += lanes) {
          const Bits upper = row_words<Op, size>(source.row(i), source.step, w);
          const Bits lower = i + 1 < count ? row_words<Op, size>(source.row(i + 1), source.step, w) : Bits{};
          const Bits even = (upper & 0xffffu) | lower << 16, odd = upper >> 16 | (lower & 0xffff0000u);
          u32* to = words + i / 2 * ld + 2 * w;
          *(Bits*)to = interleave_low(even, odd, Order{});
          if (2 * w + lanes < ld) *(Bits*)(to + lanes) = interleave_high(even, odd, Order{});
        }
    }
  }
};

}  // namespace arch
