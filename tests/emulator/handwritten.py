"""Small kernels written in a test: a body, the tensors that it is given by name, a launch."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jitattn import params as parameters

from . import region, run
from .boxes import MAP_BYTES, tensor_map

__all__ = ["box_map", "launch"]

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
struct alignas(64) TensorMap {{
  char opaque[128];
}};
#include "ptx.h"
#include "mbarrier.h"
#include "tma.h"
#include "wgmma.h"
#include "cluster.h"
#include "launch.h"

struct Config {{
  static constexpr i32 warps = {warps}, cluster = {cluster};
}};
struct Params {{
  {params}
}};
struct Kernel {{
  struct Memory {{
    alignas(1024) char at[{shared_bytes}];
  }};
  static METHOD void run(i32 block, Memory& memory, Params const& p) {{
    const u32 thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 shared = ptx::shared_address(&memory);
#line 1 "<body>"
{body}
#line 1 "<entry>"
  }}
}};
JITATTN_ENTRY_OF_CLUSTERS(Kernel, Params)
"""


def launch(
    body: str, *, warps: int = 1, shared_bytes: int = 4096, blocks: int | None = None, cluster: int = 1,
    inputs: str = "", seed: int = 0, race_check: bool = False, flags: Sequence[str] = (),
    boxes: Mapping[str, int] | None = None, **tensors: Tensor,
) -> None:  # fmt: skip
    """Run a kernel whose body has `thread`, `lane`, `warp`, `block`, `shared` (the address of its memory) and `p.NAME`
    for every tensor; those named in `inputs` may not be written. For those in `boxes`, of so many rows, there is a
    tensor map `p.NAME_map`. There is one cluster of blocks, if not more."""
    maps = {name: box_map(tensors[name], rows) for name, rows in (boxes or {}).items()}
    members = [f"{_POINTERS[x.dtype]} {name};" for name, x in tensors.items()] + [f"TensorMap {x}_map;" for x in maps]
    text = _TEXT.format(warps=warps, cluster=cluster, shared_bytes=shared_bytes, params="\n  ".join(members), body=body)
    options: dict[str, Any] = {"seed": seed, "race_check": race_check, "flags": flags}
    regions = [region(name, x, writable=name not in inputs.split()) for name, x in tensors.items()]
    pointers = struct.pack(f"={len(tensors)}Q", *(x.data_ptr() for x in tensors.values()))
    padding = bytes(-len(pointers) % 64 if maps else 0)
    packed = b"".join(tensor_map(each, tensors[name].data_ptr()).ljust(MAP_BYTES, b"\0") for name, each in maps.items())
    run(text, pointers + padding + packed, blocks or cluster, regions, **options)


def box_map(x: Tensor, rows: int) -> parameters.TensorMap:
    """A tensor, (S, D) or more dimensions, copied by boxes of so many rows."""
    x = x[(None,) * (4 - x.dim())]
    size = x.element_size()
    batch, heads, length, width = x.shape
    return parameters.TensorMap(
        pointer=0, offset=0, dtype=str(x.dtype).removeprefix("torch."), sizes=(width, length, heads, batch),
        stride_bytes=(x.stride(2) * size, x.stride(1) * size, x.stride(0) * size), box=(128 // size, rows),
    )  # fmt: skip
