"""One problem of every family of GPU kernels, to be run under NVIDIA's checkers:

    compute-sanitizer --tool memcheck  python -m tests.sanitize
    compute-sanitizer --tool racecheck python -m tests.sanitize 0 12    # the first of twelve parts: this takes long

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
        for dim in (64, 128, 256)  # on Hopper each has kernels of its own
        for causal in (False, "bottom_right")
    ]
    # Of Hopper's kernels: several blocks of rows for a block of threads, parts of boxes, V's head dim another.
    found.append(Case(torch.bfloat16, heads_q=48, heads_kv=12, seq_q=700, seq_kv=700, causal="top_left"))
    found.append(Case(torch.float16, head_dim=112, head_dim_v=72, seq_q=333, seq_kv=150, causal="bottom_right"))
    found.append(Case(torch.bfloat16, head_dim=192, head_dim_v=128, seq_q=130, seq_kv=260, causal="top_left"))
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
