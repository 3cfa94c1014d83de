"""One problem of every family of GPU kernels, to be run under NVIDIA's checkers:

    compute-sanitizer --tool memcheck  python -m tests.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitize 0 4    # the first of four parts: this takes long

Torch's allocator hands out parts of larger blocks, which hides accesses beyond a tensor's end: this turns it off.
"""

from __future__ import annotations

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import sys

import torch

import jitattn
from tests import oracle
from tests.cases import Case, all_layouts


def problems() -> list[Case]:
    """Each dtype at the head dims that tables tell apart, split keys, odd strides, elements that lie apart."""
    found = [
        Case(dtype, head_dim=dim, head_dim_v=dim, causal=causal)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for dim in (64, 128, 256)
        for causal in (False, "bottom_right")
    ]
    for dtype in (torch.bfloat16, torch.float32):
        found.append(Case(dtype, head_dim=33, head_dim_v=17, layouts=all_layouts("odd")))
        found.append(Case(dtype, head_dim=40, head_dim_v=40, layouts=all_layouts("bhds")))
        found.append(Case(dtype, heads_q=1, heads_kv=1, seq_q=20, seq_kv=1500, causal="bottom_right"))
    return found


def main(part: int = 0, parts: int = 1) -> None:
    for case in problems()[part::parts]:
        for deterministic in (False, True):
            oracle.verify(case, jitattn.attention, device="cuda", deterministic=deterministic)
            print(case, "deterministic" if deterministic else "")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
