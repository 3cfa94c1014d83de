// Tiles of a block of threads in the algorithm's terms: matrices in registers, spread over the block's warps, and their
// products with rows in shared memory.
#pragma once
#include "shared.h"

namespace arch {

// Warps side by side: `down` along a matrix's rows, `across` its columns.
template <i32 down_, i32 across_>
struct Warps {
  static constexpr i32 down = down_, across = across_;
  static METHOD i32 row_part() { return warp() / across; }
  static METHOD i32 column_part() { return warp() % across; }
};

// Columns that a matrix of head-dim rows has: whole operands for each of the warps side by side.
template <class C>
constexpr i32 columns(i32 head_dim) {
  return base::round_up(head_dim, C::pad);
}

// A float32 matrix in the registers of a block, each warp holding a rectangle of it.
template <class W, i32 rows_, i32 columns_>
struct Matrix {
  static constexpr i32 rows = rows_, columns = columns_;
  static constexpr i32 warp_rows = rows / W::down, warp_columns = columns / W::across;
  static constexpr i32 m_tiles = warp_rows / 16, n_tiles = warp_columns / 8;
  static_assert(warp_rows % 16 == 0 && warp_columns % 16 == 0, "a warp's part must be whole operands");
  float at[m_tiles][n_tiles][4];

  static METHOD i32 first_row() { return W::row_part() * warp_rows; }
  static METHOD i32 first_column() { return W::column_part() * warp_columns; }
  // Where element e of tile (i, j) of this lane stands.
  static METHOD i32 row(i32 i, i32 e) { return first_row() + i * 16 + e / 2 * 8 + lane() / 4; }
  static METHOD i32 column(i32 j, i32 e) { return first_column() + j * 8 + lane() % 4 * 2 + e % 2; }

  METHOD void clear() {
#pragma unroll
    for (i32 i = 0; i < m_tiles; ++i)
#pragma unroll
      for (i32 j = 0; j < n_tiles; ++j)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) at[i][j][e] = 0.0f;
  }

  METHOD void add(Matrix const& other, float factor = 1.0f) {
#pragma unroll
    for (i32 i = 0; i < m_tiles; ++i)
#pragma unroll
      for (i32 j = 0; j < n_tiles; ++j)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) at[i][j][e] += other.at[i][j][e] * factor;
  }

  // f(row slot, row, column, element) for every element of this lane.
  template <class F>
  METHOD void each_slot(F f) {
#pragma unroll
    for (i32 i = 0; i < m_tiles; ++i)
#pragma unroll
      for (i32 j = 0; j < n_tiles; ++j)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) f(2 * i + e / 2, row(i, e), column(j, e), at[i][j][e]);
  }

  // f(statistic, row, column, element), the statistic being that of the row.
  template <class PerRow, class F>
  METHOD void each(PerRow&& statistics, F f) {
    each_slot([&](i32 slot, i32 row, i32 column, float& x) { f(statistics.slot[slot], row, column, x); });
  }

  // f(row slot, element, the other's element)
  template <class F>
  METHOD void each_with(Matrix const& other, F f) {
#pragma unroll
    for (i32 i = 0; i < m_tiles; ++i)
#pragma unroll
      for (i32 j = 0; j < n_tiles; ++j)
#pragma unroll
        for (i32 e = 0; e < 4; ++e) f(2 * i + e / 2, at[i][j][e], other.at[i][j][e]);
  }

  // As the left side of a product that contracts columns: 16 rows, one step of columns. `factor` is for floats.
  template <class E>
  METHOD Operand<E> left(i32 i, i32 step_index, float factor = 1.0f) const {
    const float (&x)[4] = at[i][2 * step_index], (&y)[4] = at[i][2 * step_index + 1];
    Operand<E> operand;
    if constexpr (sizeof(E) == 4) {
#pragma unroll
      for (i32 word = 0; word < 4; ++word) {
        const float* pair = (word < 2 ? x : y) + word % 2 * 2;
        const Halves h = halves(pair[0] * factor, pair[1] * factor);
        operand.high.word[word] = h.high, operand.low.word[word] = h.low;
      }
    } else {
      operand.word[0] = pack(E{}, x[0], x[1]), operand.word[1] = pack(E{}, x[2], x[3]);
      operand.word[2] = pack(E{}, y[0], y[1]), operand.word[3] = pack(E{}, y[2], y[3]);
    }
    return operand;
  }

  // Puts the elements, converted, into rows of shared memory; `factor(slot)` is what a row is multiplied by.
  template <class Rows, class F>
  METHOD void put(Rows& to, F factor) const {
    each_pair(factor, [&](i32 row, i32 column, float x, float y) { to.put(row, column, x, y); });
  }
  // The same as operands.
  template <class Rows>
  METHOD void put_operands(Rows& to, float factor) const {
    each_pair([&](i32) { return factor; },
              [&](i32 row, i32 column, float x, float y) { to.put_operand(row, column, x, y); });
  }

 private:
  template <class F, class Put>
  METHOD void each_pair(F factor, Put put) const {
#pragma unroll
    for (i32 i = 0; i < m_tiles; ++i)
#pragma unroll
      for (i32 j = 0; j < n_tiles; ++j)
#pragma unroll
        for (i32 e = 0; e < 4; e += 2) {
          const float f = factor(2 * i + e / 2);
          put(row(i, e), column(j, e), at[i][j][e] * f, at[i][j][e + 1] * f);
        }
  }
};

// Scores of the query rows of a block against a tile of keys. As a rule a warp has whole rows; where C::across is more
// than 1, so many warps share them.
template <class C>
using Scores = Matrix<Warps<C::warps / C::across, C::across>, C::block_m, C::block_n>;

// One value for each query row that a lane holds scores of; four lanes share a row.
template <class C, class T>
struct PerRow {
  static constexpr i32 slots = 2 * Scores<C>::m_tiles;
  T slot[slots];
};

// Makes of the parts of four lanes what the whole row has.
template <class C, class T>
FN void share_max(PerRow<C, T>& rows) {
#pragma unroll
  for (i32 mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (i32 i = 0; i < rows.slots; ++i)
      rows.slot[i].top = max(rows.slot[i].top, ptx::shuffle_xor(rows.slot[i].top, mask));
}
template <class C, class T>
FN void share_sum(PerRow<C, T>& rows) {
#pragma unroll
  for (i32 mask = 1; mask < 4; mask *= 2)
#pragma unroll
    for (i32 i = 0; i < rows.slots; ++i) rows.slot[i].total += ptx::shuffle_xor(rows.slot[i].total, mask);
}

// One float a row from each warp that shares it.
template <class C>
struct RowExchange {
  float at[C::across][C::block_m];

  // f(slot) is this warp's.
  template <class F>
  METHOD void put(F f) {
    if (lane() % 4) return;
#pragma unroll
    for (i32 i = 0; i < PerRow<C, float>::slots; ++i) at[part()][row(i)] = f(i);
  }
  // f(slot, value) with those of the others.
  template <class F>
  METHOD void take(F f) const {
#pragma unroll
    for (i32 i = 0; i < PerRow<C, float>::slots; ++i)
#pragma unroll
      for (i32 other = 1; other < C::across; ++other) f(i, at[(part() + other) % C::across][row(i)]);
  }

 private:
  static METHOD i32 part() { return warp() % C::across; }
  static METHOD i32 row(i32 slot) { return Scores<C>::row(slot / 2, slot % 2 * 2); }
};

// Whether a row of this warp has a factor other than 1.
template <class C>
FN bool any_changes(PerRow<C, float> const& factor) {
  bool changes = false;
#pragma unroll
  for (i32 i = 0; i < factor.slots; ++i) changes |= factor.slot[i] != 1.0f;
  return ptx::any(changes);
}

// One value a row, in global memory.
template <class C>
FN void store_per_row(float* to, PerRow<C, float> const& from, i32 rows) {
  if (lane() % 4 || warp() % C::across) return;
#pragma unroll
  for (i32 i = 0; i < from.slots; ++i) {
    const i32 row = Scores<C>::row(i / 2, i % 2 * 2);
    if (row < rows) to[row] = from.slot[i];
  }
}

// Products of a warp: `left(i, k)` gives the operand of row tile i, `right(j, k)` that of column pair j, for every step
// k of what is contracted, each once.

// to += left right, all in the tensor cores. The right operands are loaded `ahead` products before they are used: what
// shared memory takes to answer then passes during products.
template <class E, i32 steps, i32 ahead, class M, class Left, class Right>
FN void multiply_inside(M& to, Left left, Right right) {
  constexpr i32 pairs = M::n_tiles / 2, products = steps * pairs;
  constexpr i32 kept = ahead / pairs + 2;  // steps whose left operands are in use
  Operand<E> a[kept][M::m_tiles], b[ahead + 1];
#pragma unroll
  for (i32 t = 0; t < products + ahead; ++t) {
    if (t < products) {
      const i32 j = t % pairs, k = t / pairs;
      if (j == 0)
#pragma unroll
        for (i32 i = 0; i < M::m_tiles; ++i) a[k % kept][i] = left(i, k);
      b[t % (ahead + 1)] = right(j, k);
    }
    const i32 u = t - ahead, j = u % pairs, k = u / pairs;
    if (u < 0) continue;
#pragma unroll
    for (i32 i = 0; i < M::m_tiles; ++i) {
      multiply_add<0>(to.at[i][2 * j], a[k % kept][i], b[u % (ahead + 1)]);
      multiply_add<1>(to.at[i][2 * j + 1], a[k % kept][i], b[u % (ahead + 1)]);
    }
  }
}

// The tensor cores do not round sums to nearest (Ootomo and Yokota 2022): where elements are floats, sums of more than
// a few steps are added up outside.
constexpr i32 few(i32 steps) { return steps % 4 == 0 ? 4 : steps % 3 == 0 ? 3 : steps % 2 == 0 ? 2 : 1; }

// to += left right
template <class E, i32 steps, i32 ahead, class M, class Left, class Right>
FN void multiply(M& to, Left left, Right right) {
  if constexpr (sizeof(E) == 2) {
    multiply_inside<E, steps, ahead>(to, left, right);
  } else {
    M whole, low;
    low.clear();
#pragma unroll 1  // a product of floats is much code, which takes long to compile
    for (i32 first = 0; first < steps; first += few(steps)) {
      whole.clear();
#pragma unroll
      for (i32 k = first; k < first + few(steps); ++k) {
        Operand<E> a[M::m_tiles];
#pragma unroll
        for (i32 i = 0; i < M::m_tiles; ++i) a[i] = left(i, k);
#pragma unroll
        for (i32 j = 0; j < M::n_tiles / 2; ++j) {
          const Operand<E> b = right(j, k);
#pragma unroll
          for (i32 i = 0; i < M::m_tiles; ++i) {
            multiply_add<0>(whole.at[i][2 * j], low.at[i][2 * j], a[i], b);
            multiply_add<1>(whole.at[i][2 * j + 1], low.at[i][2 * j + 1], a[i], b);
          }
        }
      }
      to.add(whole);
    }
    to.add(low, low_unit);
  }
}

// to += factor left right, for wide sums that stay in registers from tile to tile. Floats, which alone have a factor,
// take a pair of columns after the other, so that few registers hold what is added outside; their left operands are
// kept.
template <class E, i32 steps, i32 ahead, class M, class Left, class Right>
FN void multiply_wide(M& to, Left left, Right right, float factor = 1.0f) {
  if constexpr (sizeof(E) == 2) {
    multiply_inside<E, steps, ahead>(to, left, right);
  } else {
    Operand<E> a[M::m_tiles][steps];
#pragma unroll
    for (i32 i = 0; i < M::m_tiles; ++i)
#pragma unroll
      for (i32 k = 0; k < steps; ++k) a[i][k] = left(i, k);
#pragma unroll
    for (i32 j = 0; j < M::n_tiles / 2; ++j) {
      float whole[M::m_tiles][2][4] = {}, low[M::m_tiles][2][4] = {};
#pragma unroll
      for (i32 k = 0; k < steps; ++k) {
        const Operand<E> b = right(j, k);
#pragma unroll
        for (i32 i = 0; i < M::m_tiles; ++i) {
          multiply_add<0>(whole[i][0], low[i][0], a[i][k], b);
          multiply_add<1>(whole[i][1], low[i][1], a[i][k], b);
        }
      }
#pragma unroll
      for (i32 i = 0; i < M::m_tiles; ++i)
#pragma unroll
        for (i32 half = 0; half < 2; ++half)
#pragma unroll
          for (i32 e = 0; e < 4; ++e)
            to.at[i][2 * j + half][e] += (whole[i][half][e] + low[i][half][e] * low_unit) * factor;
    }
  }
}

}  // namespace arch
