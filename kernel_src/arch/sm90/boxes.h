// Rows in shared memory as the copy engine takes and leaves them, and as products of warpgroups read them: boxes of 64
// columns, one after the other, each row after row with 128-byte swizzle (tma.h, wgmma.h).
#pragma once
#include "attn/schedule.h"
#include "base/math.h"
#include "mbarrier.h"
#include "tile.h"
#include "tma.h"
#include "wgmma.h"

namespace arch {

template <class E, i32 rows, i32 size>
struct BoxedRows {
  static_assert(sizeof(E) == 2 && rows % 8 == 0, "");
  static constexpr i32 box_columns = 64, row_bytes = 128, box_bytes = rows * row_bytes;
  static constexpr i32 boxes = base::ceil_div(size, box_columns), bytes = boxes * box_bytes;
  static constexpr i32 steps = base::ceil_div(size, 16);  // of a product that contracts columns
  alignas(1024) char at[bytes];

  METHOD u32 address() const { return ptx::shared_address(at); }

  // Starts to bring rows of a head, of these the columns from `column` on; `bytes` will arrive at the mbarrier.
  METHOD void fetch(TensorMap const& map, u32 mbarrier, i32 row, i32 head, i32 batch, i32 column = 0) {
#pragma unroll
    for (i32 box = 0; box < boxes; ++box)
      ptx::tma_load(address() + box * box_bytes, map, mbarrier, column + box * box_columns, row, head, batch);
  }
  // Starts to write rows from `row` on, as many as the map's boxes have, or of these rows some of the boxes.
  METHOD void store(TensorMap const& map, i32 row, i32 to_row, i32 head, i32 batch) const {
    store<boxes>(map, 0, row, to_row, head, batch);
  }
  template <i32 count>
  METHOD void store(TensorMap const& map, i32 first_box, i32 row, i32 to_row, i32 head, i32 batch) const {
#pragma unroll
    for (i32 i = 0; i < count; ++i) {
      const i32 box = first_box + i;
      ptx::tma_store(map, address() + box * box_bytes + row * row_bytes, box * box_columns, to_row, head, batch);
    }
  }

  // Rows from a multiple of 8 on, for products that contract columns; `along` gives what one step takes of them.
  METHOD u64 rows_from(i32 row) const { return ptx::swizzled(address() + row * row_bytes); }
  static METHOD u64 along(u64 rows_from, i32 step) {
    return rows_from + (u64)((step / 4 * box_bytes + step % 4 * 32) >> 4);
  }
  // For products that contract rows: 64 columns and more from a multiple of 64 on.
  METHOD u64 columns_from(i32 column = 0) const {
    return ptx::swizzled(address() + column / box_columns * box_bytes, box_bytes);
  }
  static METHOD u64 across(u64 columns_from, i32 step) { return columns_from + (u64)(step * 16 * row_bytes >> 4); }

  // Puts a matrix in its place, converted and row for row multiplied by factor(slot).
  template <class M, class F>
  METHOD void put(M const& from, F factor) {
    const Place<M> to = place<M>();
#pragma unroll
    for (i32 j = 0; j < M::n_tiles; ++j)
#pragma unroll
      for (i32 slot = 0; slot < 2; ++slot)
        ptx::store_shared(to.at(j, slot), pack(E{}, from.at[0][j][2 * slot] * factor(slot),
                                               from.at[0][j][2 * slot + 1] * factor(slot)));
  }
  // The same of what has been made left operands of a matrix M.
  template <class M>
  METHOD void put_operands(const Operand<E> (&from)[M::n_tiles / 2]) {
    const Place<M> to = place<M>();
#pragma unroll
    for (i32 i = 0; i < M::n_tiles / 2; ++i)
#pragma unroll
      for (i32 word = 0; word < 4; ++word) ptx::store_shared(to.at(2 * i + word / 2, word % 2), from[i].word[word]);
  }
  // use(tile, slot, word): what this lane has put for two neighbouring columns of a matrix M.
  template <class M, class Use>
  METHOD void each_put(Use use) const {
    const Place<M> from = place<M>();
#pragma unroll
    for (i32 j = 0; j < M::n_tiles; ++j)
#pragma unroll
      for (i32 slot = 0; slot < 2; ++slot) use(j, slot, ptx::load_shared<u32>(from.at(j, slot)));
  }

 private:
  // Where this lane's neighbouring elements of 8 columns lie, of its row (slot 0) and that 8 further (slot 1).
  template <class M>
  struct Place {
    static_assert(M::m_tiles == 1, "");
    // Columns of a warp begin with a box, or share one with other warps'.
    static constexpr bool whole_boxes = M::warp_columns % box_columns == 0 || M::warp_columns == M::columns;
    u32 row, swizzle;
    METHOD u32 at(i32 tile, i32 slot) const {
      const u32 first = whole_boxes ? 0 : (u32)M::first_column() / 8;
      return row + (((first + tile) % 8 * 16) ^ swizzle) + tile / 8 * box_bytes + slot * 8 * row_bytes;
    }
  };
  // Worked out here and now: as constants of an outer loop places would fill registers all through it.
  template <class M>
  METHOD Place<M> place() const {
    const u32 lane = ptx::here_and_now((u32)arch::lane());
    const i32 box = M::first_column() / box_columns;
    return {address() + box * box_bytes + (M::first_row() + lane / 4) * row_bytes + lane % 4 * 4, lane / 4 * 16};
  }
};

}  // namespace arch
