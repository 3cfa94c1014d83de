// Rows of a matrix in shared memory: how a block of threads brings them there, and how a warp takes them out as
// operands.
#pragma once
#include "attn/layout.h"
#include "base/math.h"
#include "copy.h"
#include "element.h"
#include "matrices.h"
#include "mma.h"

namespace arch {

constexpr i32 chunk_bytes = 16;  // what one lane gives to a matrix load
constexpr i32 step_bytes = 32;   // what one product contracts: 16 elements of 16 bits or 8 floats
template <class E>
constexpr i32 step = step_bytes / (i32)sizeof(E);

FN i32 lane() { return (i32)ptx::thread_index() % 32; }
FN i32 warp() { return (i32)ptx::thread_index() / 32; }

// What the block's threads fetched is there, except for the latest `pending` groups, and nobody uses what was there
// before.
template <i32 pending = 0>
FN void arrive() {
  fetches_commit();
  fetches_wait<pending>();
  ptx::sync_block();
}

// `size` elements a row, padded with zeros to `columns` (whole operands).
template <class E, i32 rows, i32 size, i32 columns = base::round_up(size, 16)>
struct SharedRows {
  static constexpr i32 steps = base::round_up(size, 16) / step<E>;  // of a product that contracts the elements
  static constexpr i32 width = columns * (i32)sizeof(E);
  static constexpr i32 chunks = width / chunk_bytes;
  // An odd number of chunks: the eight rows that a matrix load reads at once then lie in different banks.
  static constexpr i32 pitch = width + chunk_bytes;
  alignas(chunk_bytes) char at[rows * pitch];

  METHOD u32 address() const { return ptx::shared_address(this); }

  // Starts to bring in the rows of a view, `vector` bytes at a time (0: elements that lie apart), with zeros beyond
  // `count` rows. The block's threads share the work.
  template <i32 threads, i32 vector>
  METHOD void fetch_rows(attn::RowsView<E> from, i32 count) {
    if (count >= rows)
      fetch<threads, vector, true>(from, rows);
    else
      fetch<threads, vector, false>(from, count);
  }

  // 16 rows from `row` on as the left side of a product, or as the right side with rows for columns.
  METHOD Operand<E> left(i32 row, i32 step_index) const {
    return load(address() + (row + lane() % 16) * pitch + lane() / 16 * chunk_bytes + step_index * step_bytes);
  }
  METHOD Operand<E> right(i32 row, i32 step_index) const {
    return load(address() + (row + lane() % 8 + lane() / 16 * 8) * pitch + lane() / 8 % 2 * chunk_bytes +
                step_index * step_bytes);
  }
  // The right side of a product that contracts rows: one step of rows from `row` on, 16 columns from `column` on.
  // Floats are taken in `pairs` (rows 2 t and 2 t + 1 where a product has t and t + 4, the order of a score tile's
  // columns) or in the order of `left`.
  template <bool pairs = true>
  METHOD Operand<E> right_by_rows(i32 row, i32 column) const {
    if constexpr (sizeof(E) == 4)
      return load_floats<pairs, 1>(row, column);
    else
      return load_transposed(address() + (row + lane() % 16) * pitch + column * (i32)sizeof(E) +
                             lane() / 16 * chunk_bytes);
  }
  // The left side of a product that contracts rows, 16 columns from `column` on.
  METHOD Operand<E> left_by_rows(i32 row, i32 column) const {
    if constexpr (sizeof(E) == 4)
      return load_floats<true, 2>(row, column);
    else
      return load_transposed(address() + (row + lane() % 8 + lane() / 16 * 8) * pitch + column * (i32)sizeof(E) +
                             lane() / 8 % 2 * chunk_bytes);
  }

  // Puts neighbouring elements in place, the first in an even column.
  METHOD void put(i32 row, i32 column, float first, float second) {
    const u32 to = address() + row * pitch + column * (i32)sizeof(E);
    if constexpr (sizeof(E) == 4)
      ptx::store_shared(to, Words2{ptx::bits(first), ptx::bits(second)});
    else
      ptx::store_shared(to, pack(E{}, first, second));
  }

  // Writes `count` rows to a view whose rows have no gaps between elements. The block's threads share the work.
  template <i32 threads>
  METHOD void store_rows(attn::RowsView<E> to, i32 count) const {
    constexpr i32 row_bytes = size * (i32)sizeof(E);
    constexpr i32 vector = base::least(row_bytes & -row_bytes, chunk_bytes);  // what every row is aligned to
    for (i32 i = (i32)ptx::thread_index(); i < rows * chunks; i += threads) {
      const i32 row = i / chunks, chunk = i % chunks;
      if (row >= count) return;
      const Words4 words = ptx::load_shared<Words4>(address() + row * pitch + chunk * chunk_bytes);
      char* at = (char*)to.row(row) + chunk * chunk_bytes;
#pragma unroll
      for (i32 byte = 0; byte < chunk_bytes; byte += vector)
        if (chunk * chunk_bytes + byte < row_bytes) ptx::store_global<vector>(at + byte, part(words, byte));
    }
  }

  // Changes the sign of every element. Not in order with anything: a barrier before and after.
  template <i32 threads>
  METHOD void negate() {
    constexpr u32 signs = sizeof(E) == 4 ? 0x80000000u : 0x80008000u;
    for (i32 i = (i32)ptx::thread_index(); i < rows * pitch / 4; i += threads) {
      if (i * 4 % pitch >= width) continue;
      const u32 word = address() + i * 4;
      ptx::store_shared(word, ptx::load_shared<u32>(word) ^ signs);
    }
  }

 private:
  // Each thread keeps to one chunk of the rows, or where rows have more chunks than there are threads, to a few.
  template <i32 threads, i32 vector, bool whole>
  METHOD void fetch(attn::RowsView<E> from, i32 count) {
    constexpr i32 at_once = base::least(chunks, threads), rows_at_once = threads / at_once;
    const i32 first = (i32)ptx::thread_index() / at_once;
    if (threads % at_once && first >= rows_at_once) return;
#pragma unroll
    for (i32 part = 0; part < base::ceil_div(chunks, at_once); ++part) {
      const i32 chunk = (i32)ptx::thread_index() % at_once + part * at_once;
      if (chunks % at_once && chunk >= chunks) break;
      const i32 before = chunk * elements;
      const i32 inside =
          size == columns ? elements : base::most(0, base::least(size - before, elements));  // of this chunk
      const E* source = from.data + first * from.stride + before * (vector ? 1 : from.step);
      const u32 to = address() + first * pitch + chunk * chunk_bytes;
#pragma unroll
      for (i32 i = 0; i < base::ceil_div(rows, rows_at_once); ++i) {
        const i32 row = first + i * rows_at_once;
        if (rows % rows_at_once && row >= rows) break;
        fetch_chunk<vector>(to + i * rows_at_once * pitch, source, from.step, whole || row < count ? inside : 0);
        source += rows_at_once * from.stride;
      }
    }
  }

  // The words from a byte on.
  METHOD static Words4 part(Words4 const& words, i32 byte) {
    Words4 rest = {};
    for (i32 i = byte / 4; i < 4; ++i) rest.word[i - byte / 4] = words.word[i];
    if (byte % 4) rest.word[0] >>= 16;
    return rest;
  }

  static constexpr i32 elements = chunk_bytes / (i32)sizeof(E);

  // One chunk whose first `count` elements exist.
  template <i32 vector>
  METHOD static void fetch_chunk(u32 to, const E* from, i64 stride, i32 count) {
    if constexpr (vector >= 4) {
#pragma unroll
      for (i32 i = 0; i < chunk_bytes; i += vector)
        arch::fetch<vector>(to + i, (const char*)from + i,
                            (u32)base::most(0, base::least(count * (i32)sizeof(E) - i, vector)));
    } else {
      Words4 words = {};
#pragma unroll
      for (i32 i = 0; i < elements; ++i)
        if (i < count) {
          const u32 x = ptx::load_global<sizeof(E)>(from + i * (vector ? 1 : stride)).word[0];
          words.word[i * (i32)sizeof(E) / 4] |= sizeof(E) == 2 && i % 2 ? x << 16 : x;
        }
      ptx::store_shared(to, words);
    }
  }

  METHOD static Operand<E> load(u32 row) {
    u32 words[4];
    load_matrices(words, row);
    Operand<E> x;
    x.set(words);
    return x;
  }
  METHOD static Operand<E> load_transposed(u32 row) {
    u32 words[4];
    load_matrices_transposed(words, row);
    Operand<E> x;
    x.set(words);
    return x;
  }
  // Two rows of two columns 8 apart: the second row goes to word `row_word` of the first column, 1 or 2.
  template <bool pairs, i32 row_word>
  METHOD Operand<E> load_floats(i32 row, i32 column) const {
    const i32 t = lane() % 4, apart = pairs ? 1 : 4;
    const u32 at = address() + (row + (pairs ? 2 * t : t)) * pitch + (column + lane() / 4) * 4;
    u32 words[4];
    words[0] = ptx::load_shared<u32>(at);
    words[row_word] = ptx::load_shared<u32>(at + apart * pitch);
    words[3 - row_word] = ptx::load_shared<u32>(at + 8 * 4);
    words[3] = ptx::load_shared<u32>(at + apart * pitch + 8 * 4);
    Operand<E> x;
    x.set(words);
    return x;
  }
};

}  // namespace arch
