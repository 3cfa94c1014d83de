// Sums that several blocks add to, as in arch/sm80, but four at a time: a lane's elements of a tile are neighbours.
#pragma once
#include "shared.h"

namespace arch {

// Where the element of a row and column stands, rows being `ld` elements long.
FN i64 accumulated_at(i64 row, i32 column, i32 ld) {
  const i32 lane = (i32)(row % 8) * 4 + column % 8 / 2, e = (i32)(row % 16) / 8 * 2 + column % 2;
  return row / 16 * 16 * ld + column / 8 * 128 + lane * 4 + e;
}

// The eight elements from a multiple of 8 on of a row, one of the upper eight of 16, and of the eighth below it.
FN void load_accumulated(float (&to)[2][8], const float* from, i64 row, i32 column, i32 ld) {
  const float* at = from + accumulated_at(row, column, ld);
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const Words4 x = ptx::load_global<16>(at + i * 4);
#pragma unroll
    for (i32 e = 0; e < 4; ++e) to[e / 2][2 * i + e % 2] = ptx::real(x.word[e]);
  }
}

// Adds a matrix to the rows from a multiple of 16 on.
template <class M>
FN void accumulate(M const& from, float* to, i32 ld) {
  float* at = to + M::first_row() * ld + M::first_column() * 16 + lane() * 4;
#pragma unroll
  for (i32 i = 0; i < M::m_tiles; ++i)
#pragma unroll
    for (i32 j = 0; j < M::n_tiles; ++j) {
      const float (&x)[4] = from.at[i][j];
      ptx::add_global(at + i * 16 * ld + j * 128, x[0], x[1], x[2], x[3]);
    }
}

}  // namespace arch
