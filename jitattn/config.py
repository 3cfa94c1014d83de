"""What is compiled into one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["KernelConfig", "KernelName"]

KernelName = Literal["forward", "backward", "reduce_grad_query"]


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
    panel: int
    bf16_dot: bool
    """Whether products take pairs of bfloat16; else 16-bit inputs are widened to float32 first."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        tiles = f"{self.block_m}x{self.block_n}"
        return f"{self.kernel} {self.dtype} d{dims}{' causal' if self.causal else ''} tiles {tiles}"
