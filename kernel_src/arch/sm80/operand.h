// An operand of a product: four words a lane, 16 rows (or twice 8 columns) by 32 bytes along the contraction.
#pragma once
#include "base/types.h"
#include "qualifiers.h"

namespace arch {

template <class E>
struct Operand {
  u32 word[4];
  METHOD void set(const u32 (&words)[4]) {
    for (i32 i = 0; i < 4; ++i) word[i] = words[i];
  }
};

}  // namespace arch
