// Members that only some kernels have.
#pragma once
#include "base/types.h"

namespace attn {

namespace detail {
struct Nothing {};
template <bool wanted, class T>
struct OnlyIf {
  using Type = T;
};
template <class T>
struct OnlyIf<false, T> {
  using Type = Nothing;
};
}  // namespace detail
template <bool wanted, class T>
using Only = typename detail::OnlyIf<wanted, T>::Type;

}  // namespace attn
