"""Small kernels written in a test: a body, the tensors that it is given by name, a launch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import region, run

__all__ = ["launch"]

_POINTERS = {
    torch.float32: "float*",
    torch.int32: "u32*",
    torch.int16: "u16*",
    torch.bfloat16: "u16*",
    torch.float16: "u16*",
    torch.uint8: "char*",
}

_TEXT = """\
#include "base/types.h"
#include "ptx.h"
#include "launch.h"

struct Config {{
  static constexpr i32 warps = {warps};
}};
struct Params {{
  {params}
}};
struct Kernel {{
  struct Memory {{
    alignas(16) char at[{shared_bytes}];
  }};
  static METHOD void run(i32 block, Memory& memory, Params const& p) {{
    const u32 thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 shared = ptx::shared_address(&memory);
#line 1 "<body>"
{body}
#line 1 "<entry>"
  }}
}};
JITATTN_ENTRY(Kernel, Params)
"""


def launch(
    body: str, *, warps: int = 1, shared_bytes: int = 4096, blocks: int = 1, inputs: str = "", seed: int = 0,
    race_check: bool = False, flags: Sequence[str] = (), **tensors: Tensor,
) -> None:  # fmt: skip
    """Run a kernel whose body has `thread`, `lane`, `warp`, `block`, `shared` (the address of its memory) and `p.NAME`
    for every tensor; those named in `inputs` may not be written."""
    params = "\n  ".join(f"{_POINTERS[x.dtype]} {name};" for name, x in tensors.items())
    text = _TEXT.format(warps=warps, shared_bytes=shared_bytes, params=params, body=body)
    options: dict[str, Any] = {"seed": seed, "race_check": race_check, "flags": flags}
    regions = [region(name, x, writable=name not in inputs.split()) for name, x in tensors.items()]
    pointers = struct.pack(f"={len(tensors)}Q", *(x.data_ptr() for x in tensors.values()))
    run(text, pointers, blocks, regions, **options)
