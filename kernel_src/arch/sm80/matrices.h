// Operands out of shared memory.
#pragma once
#include "ptx.h"

namespace arch {

FN void load_matrices(u32 (&to)[4], u32 row) { ptx::load_matrices(to, row); }
FN void load_matrices_transposed(u32 (&to)[4], u32 row) { ptx::load_matrices_transposed(to, row); }

}  // namespace arch
