"""What `jitattn bench` measures, and the implementations that it compares with."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["PEERS", "Attend", "Case", "Passes", "Peer"]

Passes = Literal["fwd", "bwd", "fwd+bwd"]


@dataclass(frozen=True)
class Case:
    """One measured call: q (batch, heads, seq, head_dim), k and v (batch, heads_kv, seq, head_dim)."""

    dtype: str
    batch: int
    heads: int
    heads_kv: int
    seq: int
    head_dim: int
    causal: bool
    passes: Passes

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype:8} {self.passes:7} {mask:6} {self.batch:5} {self.heads:5} {self.seq:6} {self.head_dim:4}"

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.passes != "fwd"

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products: 2 products forward, 5 backward; causal, half."""
        pairs = self.seq * (self.seq + 1) / 2 if self.causal else self.seq**2
        return {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[self.passes] * 2.0 * self.batch * self.heads * pairs * self.head_dim


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v -> out (B, H, S, D)


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with.

    ``missing(device)`` says why it cannot run there, None if it can. ``prepare(case)`` is called once a case,
    outside any timing. ``scratch(case)`` is how many bytes a call takes beyond its arguments and results. A
    RuntimeError, ImportError or AssertionError from ``prepare`` or the first call leaves the peer out of that case,
    with the reason in the report.
    """

    name: str
    missing: Callable[[torch.device], str | None]
    prepare: Callable[[Case], Attend]
    scratch: Callable[[Case], int]


def sdpa(case: Case) -> Attend:
    """torch's scaled_dot_product_attention, as torch dispatches it."""
    grouped = case.heads != case.heads_kv
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)


def sdpa_by(backend: SDPBackend) -> Callable[[Case], Attend]:
    """The same, held to one of its implementations."""

    def prepare(case: Case) -> Attend:
        dispatched = sdpa(case)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return dispatched(q, k, v)

        return attend

    return prepare


def score_matrices(forward: int, backward: int) -> Callable[[Case], int]:
    """The size of so many float32 (batch, heads, seq, seq) matrices."""
    return lambda case: (backward if case.backward else forward) * 4 * case.batch * case.heads * case.seq**2


def flex_attention(case: Case) -> Attend:
    """torch's FlexAttention, compiled."""
    from torch.nn.attention import flex_attention as flex

    grouped = case.heads != case.heads_kv
    mask = None
    if case.causal:
        mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, case.seq, case.seq, device="cuda")
    compiled = _compiled_flex()
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=grouped)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


def flash_attn_interface(case: Case) -> Attend:
    """FlashAttention-3: (B, S, H, D) tensors."""
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

    return _rows_first(flash_attn_func, case)


def flash_attn_cute(case: Case) -> Attend:
    """FlashAttention-4: (B, S, H, D) tensors."""
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    return _rows_first(flash_attn_func, case)


def _rows_first(function: Callable[..., Any], case: Case) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=case.causal)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return attend


def _on_gpus(module: str | None = None) -> Callable[[torch.device], str | None]:
    """What a peer lacks that runs on GPUs alone, and needs a module."""

    def missing(device: torch.device) -> str | None:
        if device.type != "cuda":
            return "it has no kernels for the CPU"
        try:
            found = module is None or importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        return None if found else f"{module} is not installed"

    return missing


# The first is the one that results are checked against.
PEERS: tuple[Peer, ...] = (
    Peer("sdpa", lambda device: None, sdpa, lambda case: 0),
    Peer("sdpa-flash", _on_gpus(), sdpa_by(SDPBackend.FLASH_ATTENTION), lambda case: 0),
    Peer("sdpa-cudnn", _on_gpus(), sdpa_by(SDPBackend.CUDNN_ATTENTION), lambda case: 0),
    Peer("sdpa-efficient", _on_gpus(), sdpa_by(SDPBackend.EFFICIENT_ATTENTION), lambda case: 0),
    Peer("sdpa-math", lambda device: None, sdpa_by(SDPBackend.MATH), score_matrices(3, 6)),
    Peer("flex", _on_gpus(), flex_attention, lambda case: 0),
    Peer("fa3", _on_gpus("flash_attn_interface"), flash_attn_interface, lambda case: 0),
    Peer("fa4", _on_gpus("flash_attn.cute"), flash_attn_cute, lambda case: 0),
)
