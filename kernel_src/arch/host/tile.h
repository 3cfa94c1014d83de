// The host as an architecture: the names that kernel_src/README.md lists, for one thread whose lanes are SIMD lanes.
//
// Scores are kept transposed, [key][query row], with the query rows along the vectors: row statistics then are plain
// vector arithmetic, a causal limit is a number of keys, and K enters products unpacked.
#pragma once
#include "operand.h"

namespace arch {

template <class C>
using Op = Operand<typename C::Element, C::bf16_dot>;

constexpr i32 key_block = block_rows;  // products come in whole blocks of this many keys

// Operands (contract: load_rows(view, count)).
template <class C>
using KeyTile = BroadcastRows<Op<C>, C::block_n, C::head_dim>;
template <class C>
using ValueTile = BroadcastRows<Op<C>, C::block_n, C::head_dim_v>;
template <class C>
using QueryPanel = VectorRows<Op<C>, C::panel, C::head_dim>;
template <class C>
using GradOutPanel = VectorRows<Op<C>, C::panel, C::head_dim_v>;
template <class C, i32 rows, i32 size>
using SummedTile = SummedRows<Op<C>, rows, size>;

// One value for each query row of a panel; a slot holds `lanes` rows.
template <class C, class T>
struct PerRow {
  static constexpr i32 slots = C::panel / lanes;
  T slot[slots];
};

// Scores of a panel of query rows against a tile of keys; also probabilities and their gradients.
template <class C>
struct Scores {
  static constexpr i32 capacity = base::round_up(C::block_n, block_rows), ld = C::panel;
  alignas(64) float at[capacity * ld];
  alignas(64) u32 pairs[Op<C>::per_word == 2 ? capacity * ld / 2 : 1];  // the same as words, where they are bfloat16
  i32 keys, slots;                                                      // in use

  // f(statistic, row, column, score) for every score. Rows and columns count from the panel's and the tile's first.
  template <class T, class F>
  METHOD void each(PerRow<C, T>& statistics, F f) {
    each_with(*this, statistics,
              [&](T& statistic, Index row, i32 column, Value& x, Value&) { f(statistic, row, column, x); });
  }
  // f(statistic, row, column, this score, other score)
  template <class T, class F>
  METHOD void each_with(Scores& other, PerRow<C, T>& statistics, F f) {
    i32 j = 0;
    for (; j + 4 <= slots; j += 4) walk<4>(j, other, statistics, f);
    for (; j < slots; ++j) walk<1>(j, other, statistics, f);
  }

  METHOD Value& at_slot(i32 n, i32 j) { return *(Value*)(at + n * ld + j * lanes); }
  // As the operand of a sum over keys (words pair two keys) or over query rows (words pair two rows).
  METHOD const typename Op<C>::Word* paired_by_key() {
    if constexpr (Op<C>::per_word == 1) {
      return at;
    } else {
      for (i32 n = 0; n < keys; n += 2)
        for (i32 j = 0; j < slots; ++j)
          *(Bits*)(pairs + n / 2 * ld + j * lanes) =
              narrow_pairs(at_slot(n, j), n + 1 < keys ? at_slot(n + 1, j) : Value{});
      return pairs;
    }
  }
  METHOD const typename Op<C>::Word* paired_by_row() {
    if constexpr (Op<C>::per_word == 1) {
      return at;
    } else {
      for (i32 n = 0; n < keys; ++n)
        for (i32 j = 0; j < slots; j += 2)
          *(Bits*)(pairs + n * (ld / 2) + j / 2 * lanes) =
              narrow_both(at_slot(n, j), j + 1 < slots ? at_slot(n, j + 1) : Value{});
      return pairs;
    }
  }

 private:
  // `count` slots side by side: their statistics stay in registers, and memory is read in order.
  template <i32 count, class T, class F>
  METHOD void walk(i32 first, Scores& other, PerRow<C, T>& statistics, F& f) {
    T statistic[count];
    Index rows[count];
#pragma GCC unroll 4
    for (i32 j = 0; j < count; ++j) {
      statistic[j] = statistics.slot[first + j];
      rows[j] = iota() + (first + j) * lanes;
    }
    for (i32 n = 0; n < keys; ++n)
#pragma GCC unroll 4
      for (i32 j = 0; j < count; ++j) f(statistic[j], rows[j], n, at_slot(n, first + j), other.at_slot(n, first + j));
#pragma GCC unroll 4
    for (i32 j = 0; j < count; ++j) statistics.slot[first + j] = statistic[j];
  }
};

// Reductions over the lanes that share a row: here none do.
template <class C, class T>
FN void share_max(PerRow<C, T>&) {}
template <class C, class T>
FN void share_sum(PerRow<C, T>&) {}

// Sums in float32, rows `ld` apart and padded to whole vectors.
FN void clear(float* at, i64 count) {
  for (i64 i = 0; i < count; i += lanes) *(Value*)(at + i) = Value{};
}
FN void add(float* to, const float* from, i64 count) {
  for (i64 i = 0; i < count; i += lanes) *(Value*)(to + i) += *(const Value*)(from + i);
}
template <i32 size, class T>
FN void store_rows(attn::RowsView<T> to, const float* from, i64 ld, i64 rows, float factor) {
  for (i64 i = 0; i < rows; ++i) store_row<size>(to.row(i), to.step, from + i * ld, factor);
}

// Sums of products, `size` elements a row.
template <i32 capacity, i32 size>
struct Sums {
  static constexpr i32 vectors = base::ceil_div(size, lanes);
  static constexpr i32 ld = vectors * lanes;
  alignas(64) float at[base::round_up(capacity, block_rows) * ld];

  METHOD void clear() { arch::clear(at, sizeof at / sizeof *at); }
  template <class T, class C>
  METHOD void store_rows(attn::RowsView<T> to, i32 count, PerRow<C, Value> const& factor) const {
    for (i32 i = 0; i < count; ++i) store_row<size>(to.row(i), to.step, at + i * ld, ((const float*)&factor)[i]);
  }
  template <class T>
  METHOD void store_rows(attn::RowsView<T> to, i32 count, float factor) const {
    arch::store_rows<size>(to, at, ld, count, factor);
  }
};

// Scores of keys from `first` to `end`, which is rounded up to a whole block.
template <Start start, class C, class Panel, class Tile>
FN void dot_part(Scores<C>& scores, Panel const& panel, Tile const& tile, i32 first, i32 end, Value* top) {
  product<Op<C>, 0, false, start>(scores.at + first * scores.ld, scores.ld, tile.words + first * tile.ld, tile.ld,
                                  panel.words, panel.ld, base::round_up(end - first, block_rows), scores.slots,
                                  Tile::depth, nullptr, top);
}
// scores = A B^T for a panel A of query rows and the first `keys` rows of a key tile B.
template <class C, class Panel, class Tile>
FN void dot(Scores<C>& scores, Panel const& panel, i32 rows, Tile const& tile, i32 keys) {
  scores.keys = keys;
  scores.slots = base::ceil_div(rows, lanes);
  dot_part<Start::zero>(scores, panel, tile, 0, keys, nullptr);
}
// The same, and of each row the largest score: as long as scores are in registers, that costs no pass over them.
template <class C, class Panel, class Tile>
FN PerRow<C, Value> dot_and_top(Scores<C>& scores, Panel const& panel, i32 rows, Tile const& tile, i32 keys) {
  scores.keys = keys;
  scores.slots = base::ceil_div(rows, lanes);
  PerRow<C, Value> top;
  for (Value& x : top.slot) x = splat(-base::infinity);
  const i32 whole = keys / block_rows * block_rows;
  dot_part<Start::zero_and_top>(scores, panel, tile, 0, whole, top.slot);
  if (whole < keys) dot_part<Start::zero>(scores, panel, tile, whole, keys, nullptr);
  for (i32 n = whole; n < keys; ++n)  // the block has more, which are no scores
    for (i32 j = 0; j < scores.slots; ++j) top.slot[j] = max(top.slot[j], scores.at_slot(n, j));
  return top;
}

// sums[row] += sum over keys of weights[row][key] tile[key]
template <class C, class Tile>
FN void sum_over_keys(float* sums, Scores<C>& weights, i32 rows, Tile const& tile) {
  product<Op<C>, Tile::vectors, true, Start::same>(sums, Tile::ld, weights.paired_by_key(), weights.ld, tile.words,
                                                   tile.ld, base::round_up(rows, 2), 0,
                                                   base::ceil_div(weights.keys, Op<C>::per_word));
}
// The same, after sums[row] *= factor[row].
template <class C, class Tile>
FN void sum_over_keys(float* sums, PerRow<C, Value> const& factor, Scores<C>& weights, i32 rows, Tile const& tile) {
  product<Op<C>, Tile::vectors, true, Start::scaled>(
      sums, Tile::ld, weights.paired_by_key(), weights.ld, tile.words, tile.ld, base::round_up(rows, 2), 0,
      base::ceil_div(weights.keys, Op<C>::per_word), (const float*)&factor);
}

// sums[key] += sum over query rows of weights[row][key] panel[row]
template <class C, class Tile>
FN void sum_over_rows(float* sums, Scores<C>& weights, i32 rows, Tile const& panel) {
  product<Op<C>, Tile::vectors, false, Start::same>(
      sums, Tile::ld, weights.paired_by_row(), weights.ld / Op<C>::per_word, panel.words, panel.ld,
      base::round_up(weights.keys, block_rows), 0, base::ceil_div(rows, Op<C>::per_word));
}

// Of each row of a panel: sum over elements of a[row] b[row]; 0 beyond the panel's rows.
template <class C, i32 size, class A, class B>
FN PerRow<C, Value> row_products(attn::RowsView<A> a, attn::RowsView<B> b, i32 rows) {
  PerRow<C, Value> to = {};
  for (i32 i = 0; i < rows; ++i) {
    Value sum = {};
    for (i32 d = 0; d < size; d += lanes)
      sum += row_floats<size>(a.row(i), a.step, d) * row_floats<size>(b.row(i), b.step, d);
    for (i32 half = lanes / 2; half > 0; half /= 2)
      for (i32 l = 0; l < half; ++l) sum[l] += sum[l + half];
    ((float*)&to)[i] = sum[0];
  }
  return to;
}

// A panel's values from memory; rows beyond the panel's get `otherwise`.
template <class C>
FN PerRow<C, Value> load_per_row(const float* from, i32 rows, float otherwise) {
  PerRow<C, Value> to;
  for (i32 i = 0; i < C::panel; ++i) ((float*)&to)[i] = i < rows ? from[i] : otherwise;
  return to;
}

// Operands that are used many times: `keep` is called once for each, `get` at every use, both with the function that
// fills one. Here they are filled once, and the memory given holds them all.
template <class T>
struct Kept {
  static constexpr i64 bytes = sizeof(T);
  T* at;
  METHOD explicit Kept(void* memory) : at(static_cast<T*>(memory)) {}
  template <class F>
  METHOD void keep(i64 i, F fill) {
    fill(at[i]);
  }
  template <class F>
  METHOD T& get(i64 i, F) {
    return at[i];
  }
};

template <class C>
FN void store_per_row(float* to, PerRow<C, Value> const& from, i32 rows) {
  for (i32 i = 0; i < rows; ++i) to[i] = ((const float*)&from)[i];
}

}  // namespace arch
