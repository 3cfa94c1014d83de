// An operand of a product: four words a lane, 16 rows (or twice 8 columns) by 16 elements of the contraction.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

namespace arch {

template <class E>
struct Operand {
  u32 word[4];
};

}  // namespace arch
