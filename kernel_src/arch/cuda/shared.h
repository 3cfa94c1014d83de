// Rows of a matrix in shared memory: how a block of threads brings them there, and how a warp takes them out as
// operands.
#pragma once
#include "attn/layout.h"
#include "base/math.h"
#include "copy.h"
#include "element.h"
#include "halves.h"
#include "matrices.h"
#include "mma.h"

namespace arch {

constexpr i32 chunk_bytes = 16;  // what one lane gives to a matrix load
constexpr i32 step = 16;         // elements that one product contracts

FN i32 lane() { return (i32)ptx::thread_index() % 32; }
FN i32 warp() { return (i32)ptx::thread_index() / 32; }

// What the block's threads fetched is there, except for the latest `pending` groups, and nobody uses what was there
// before. `prepare` does what each thread has to do to what it fetched itself: SharedRows::make_operands.
template <i32 pending = 0, class F>
FN void arrive(F prepare) {
  fetches_commit();
  fetches_wait<pending>();
  prepare();
  ptx::sync_block();
}
template <i32 pending = 0>
FN void arrive() {
  arrive<pending>([] {});
}

// `size` elements a row, padded with zeros to `columns` (whole operands). A float takes the same room as an operand,
// but then eight neighbours are eight high and eight low halves.
template <class E, i32 rows, i32 size, i32 columns = base::round_up(size, 16)>
struct SharedRows {
  static constexpr bool floats = sizeof(E) == 4;
  static constexpr i32 steps = base::round_up(size, 16) / step;  // of a product that contracts the elements
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

  // Makes operands, multiplied by `factor`, of the floats that this thread fetched with `fetch_rows`.
  template <i32 threads>
  METHOD void make_operands(float factor) {
    if constexpr (floats)
      each_own_chunk<threads>([&](u32 at, i32, bool exists) {
        const Words4 x = exists ? ptx::load_shared<Words4>(at) : Words4{};
        const Halves a = halves(ptx::real(x.word[0]) * factor, ptx::real(x.word[1]) * factor);
        const Halves b = halves(ptx::real(x.word[2]) * factor, ptx::real(x.word[3]) * factor);
        // Of two neighbours one keeps the high halves of both, the other the low ones.
        const bool odd = lane() % 2;
        const u32 first = ptx::shuffle(odd ? a.high : a.low, lane() ^ 1);
        const u32 second = ptx::shuffle(odd ? b.high : b.low, lane() ^ 1);
        if (exists)
          ptx::store_shared(at, odd ? Words4{first, second, a.low, b.low} : Words4{a.high, b.high, first, second});
      });
  }

  // 16 rows from `row` on as the left side of a product, or as the right side with rows for columns.
  METHOD Operand<E> left(i32 row, i32 step_index) const {
    return load<false>(row + lane() % 16, step_index * step + lane() / 16 * 8);
  }
  METHOD Operand<E> right(i32 row, i32 step_index) const {
    return load<false>(row + lane() % 8 + lane() / 16 * 8, step_index * step + lane() / 8 % 2 * 8);
  }
  // The right side of a product that contracts rows: one step of rows from `row` on, 16 columns from `column` on.
  METHOD Operand<E> right_by_rows(i32 row, i32 column) const {
    return load<true>(row + lane() % 16, column + lane() / 16 * 8);
  }
  // The left side of a product that contracts rows, 16 columns from `column` on.
  METHOD Operand<E> left_by_rows(i32 row, i32 column) const {
    return load<true>(row + lane() % 8 + lane() / 16 * 8, column + lane() / 8 % 2 * 8);
  }

  // Puts neighbouring elements in place, the first in an even column.
  METHOD void put(i32 row, i32 column, float first, float second) {
    const u32 to = address() + row * pitch + column * (i32)sizeof(E);
    if constexpr (floats)
      ptx::store_shared(to, Words2{ptx::bits(first), ptx::bits(second)});
    else
      ptx::store_shared(to, pack(E{}, first, second));
  }
  // The same as part of an operand.
  METHOD void put_operand(i32 row, i32 column, float first, float second) {
    if constexpr (floats) {
      const Halves x = halves(first, second);
      const u32 to = address() + row * pitch + column / 8 * eight_bytes + column % 8 * 2;
      ptx::store_shared(to, x.high);
      ptx::store_shared(to + chunk_bytes, x.low);
    } else {
      put(row, column, first, second);
    }
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

  // Changes the sign of every element of operands. Not in order with anything: a barrier before and after.
  template <i32 threads>
  METHOD void negate() {
    constexpr u32 signs = 0x80008000u;
    for (i32 i = (i32)ptx::thread_index(); i < rows * pitch / 4; i += threads) {
      if (i * 4 % pitch >= width) continue;
      const u32 word = address() + i * 4;
      ptx::store_shared(word, ptx::load_shared<u32>(word) ^ signs);
    }
  }

 private:
  static constexpr i32 eight_bytes = 8 * (i32)sizeof(E);

  // f(shared address, chunk, whether it exists) for the chunks of one of the rows that a thread fetches: each keeps to
  // one chunk of the rows, or where rows have more chunks than there are threads, to a few. All lanes take part.
  template <i32 threads, class F>
  METHOD void each_own_chunk(F f) {
    constexpr i32 at_once = base::least(chunks, threads), rows_at_once = threads / at_once;
    const i32 first = (i32)ptx::thread_index() / at_once;
    const bool takes_part = threads % at_once == 0 || first < rows_at_once;
#pragma unroll
    for (i32 part = 0; part < base::ceil_div(chunks, at_once); ++part) {
      const i32 chunk = (i32)ptx::thread_index() % at_once + part * at_once;
      const u32 to = address() + first * pitch + chunk * chunk_bytes;
#pragma unroll 8  // much code otherwise, and more under way than there are registers
      for (i32 i = 0; i < base::ceil_div(rows, rows_at_once); ++i) {
        const bool inside = rows % rows_at_once == 0 || first + i * rows_at_once < rows;
        f(to + i * rows_at_once * pitch, chunk, takes_part && chunk < chunks && inside);
      }
    }
  }

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

  // Four 8 x 8 matrices of which this lane gives one row; `column` is a multiple of 8.
  template <bool transposed>
  METHOD Operand<E> load(i32 row, i32 column) const {
    const u32 from = address() + row * pitch + column / 8 * eight_bytes;
    if constexpr (floats)
      return {load_matrices<f16, transposed>(from), load_matrices<f16, transposed>(from + chunk_bytes)};
    else
      return load_matrices<E, transposed>(from);
  }
  template <class T, bool transposed>
  METHOD static Operand<T> load_matrices(u32 row) {
    Operand<T> x;
    if constexpr (transposed)
      arch::load_matrices_transposed(x.word, row);
    else
      arch::load_matrices(x.word, row);
    return x;
  }
};

}  // namespace arch
