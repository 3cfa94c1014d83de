// Rows of a warpgroup's sums straight from registers to global memory.
#pragma once
#include "attn/layout.h"
#include "tile.h"

namespace arch {

// Four lanes hold a row's columns in pairs, of each tile of 8 columns one pair a lane. Afterwards each holds a tile's
// four pairs: lane t (of the four) those of tile t.
FN Words4 whole_tile(Words4 pairs) {
#pragma unroll
  for (i32 mask = 1; mask < 4; mask *= 2) {
    const bool upper = lane() & mask;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      if (i & mask) continue;
      u32 &low = pairs.word[i], &high = pairs.word[i | mask];
      const u32 other = ptx::shuffle(upper ? low : high, lane() ^ mask);
      (upper ? low : high) = other;
    }
  }
  return pairs;
}

// The first `size` columns (a multiple of 8, rows being aligned to 16 bytes), converted and row for row multiplied by
// factor(slot), of `rows` rows; only the first `columns` of them, a multiple of 8, where these are fewer.
template <i32 size, class E, class M, class F>
FN void store_rows(attn::RowsView<E> to, i32 rows, M const& from, F factor, i32 columns = size) {
  static_assert(M::m_tiles == 1 && size % 8 == 0 && sizeof(E) == 2, "");
  constexpr i32 tiles = size / 8;
  const i32 own = lane() % 4;
#pragma unroll
  for (i32 slot = 0; slot < 2; ++slot) {
    const i32 row = M::row(0, 2 * slot);
    E* at = to.row(row) + own * 8;
    const float f = factor(slot);
#pragma unroll
    for (i32 first = 0; first < tiles; first += 4) {
      Words4 pairs = {};
#pragma unroll
      for (i32 i = 0; i < 4; ++i)
        if (first + i < tiles) {
          const float (&x)[4] = from.at[0][first + i];
          pairs.word[i] = pack(E{}, x[2 * slot] * f, x[2 * slot + 1] * f);
        }
      pairs = whole_tile(pairs);
      if (row < rows && (first + 4 <= tiles || first + own < tiles) && (first + own) * 8 < columns)
        ptx::store_global<16>(at + first * 8, pairs);
    }
  }
}

}  // namespace arch
