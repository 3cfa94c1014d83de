// Where a tensor's rows lie in memory. Strides count elements.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

namespace attn {

// Consecutive rows of one head: element (i, d) at data[i * stride + d * step].
template <class T>
struct RowsView {
  T* data;
  i64 stride, step;
  METHOD T* row(i64 i) const { return data + i * stride; }
  METHOD RowsView from(i64 i) const { return {row(i), stride, step}; }
};

template <class T>
FN RowsView<T> rows_view(T* base, i64 batch, i64 batch_stride, i64 head, i64 head_stride, i64 row, i64 row_stride,
                         i64 step) {
  return {base + batch * batch_stride + head * head_stride + row * row_stride, row_stride, step};
}

}  // namespace attn
