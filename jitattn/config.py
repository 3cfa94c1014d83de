"""What is compiled into one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["KernelConfig", "KernelName"]

KernelName = Literal[
    "forward", "forward_warpgroups", "combine", "largest", "largest_backward", "delta", "backward",
    "backward_warpgroups", "backward_wide", "grad_query", "store_grad_query", "reduce_grad_query",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Everything that is compiled into one kernel."""

    kernel: KernelName
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    block_m: int
    block_n: int
    constants: tuple[tuple[str, int | bool], ...] = ()
    """What else the architecture's kernels are compiled for, by name: mostly numbers of a table's row."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        tiles = f"{self.block_m}x{self.block_n}"
        return f"{self.kernel} {self.dtype} d{dims}{' causal' if self.causal else ''} tiles {tiles}"
