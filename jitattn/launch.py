"""Tensors -> outputs: the only place where tensors meet kernels.

What depends on shapes, strides and flags alone is worked out once and kept (a `_Forward` or `_Backward`); a further
call of that kind allocates its outputs, packs their addresses and launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import params, pipeline, target
from .errors import Unsupported
from .pipeline import Ready
from .problem import DTYPES, Direction, Problem

__all__ = ["backward", "check", "describe", "forward"]

_KEPT = 4096  # shapes whose preparation is remembered

_FORWARD_POINTERS = params.FORWARD.pack_pointers()
_BACKWARD_POINTERS = params.BACKWARD.pack_pointers()


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, trains: bool = False
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in float32.

    With `trains` the backward kernels are compiled as well, side by side with the forward and while it runs.
    """
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, scale, causal, trains,
    )  # fmt: skip
    call = _forwards.get(key)
    if call is None:
        call = _remember(_forwards, key, _Forward(q, k, v, scale, causal, trains))
    return call(q, k, v)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, causal: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV, contiguous, in the dtype and shape of q, k and v."""
    if out.stride(3) != 1:
        out = out.contiguous()
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), grad_out.stride(), q.dtype,
        q.device, scale, causal,
    )  # fmt: skip
    call = _backwards.get(key)
    if call is None:
        call = _remember(_backwards, key, _Backward(grad_out, q, k, v, out, scale, causal))
    return call(grad_out, grad_lse, q, k, v, out, lse)


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless the three tensors fit together and their kind is supported.

    :raises ValueError: shapes, dtypes or devices that do not belong together.
    :raises Unsupported: a dtype or head dim that no kernel takes.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, heads, sequence, head dim), but its shape is {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k and v must share a dtype, but q is {q.dtype} and {name} is {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must be on one device, but q is on {q.device} and {name} on {x.device}")
    (batch, heads_q, _, head_dim), (_, heads_kv, seq_kv, _), head_dim_v = q.shape, k.shape, v.shape[3]
    if tuple(k.shape) != (batch, heads_kv, seq_kv, head_dim):
        raise ValueError(f"k {tuple(k.shape)} must have the batch and head dim of q {tuple(q.shape)}")
    if tuple(v.shape) != (batch, heads_kv, seq_kv, head_dim_v):
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and length of k {tuple(k.shape)}")
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(f"q has {heads_q} heads, which is no multiple of the {heads_kv} heads of k and v")
    if not head_dim or not head_dim_v:
        raise Unsupported(f"head dims must be at least 1, not {head_dim} (q, k) and {head_dim_v} (v)")
    if dtype_name(q.dtype) not in DTYPES:
        raise Unsupported(
            f"{q.dtype} is not supported on {q.device.type}: use float32, bfloat16 or float16, or "
            f'backend="reference", which computes float64 by plain torch operations'
        )


def describe(direction: Direction, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str) -> Problem:
    """The problem that these tensors pose; `causal` is "none", "top_left" or "bottom_right"."""
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_kv, head_dim_v = v.shape[1:]
    return Problem(
        direction=direction,
        dtype=dtype_name(q.dtype),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal != "none",
        seq_q=seq_q,
        seq_kv=seq_kv,
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        diagonal=seq_kv - seq_q if causal == "bottom_right" else 0,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
    )


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Forward:
    """All forward calls of one kind."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, trains: bool) -> None:
        check(q, k, v)
        problem = describe("forward", q, k, v, scale, causal)
        on = target.detect(q.device.type)
        if trains:
            pipeline.prefetch(problem, on)  # first, since it is needed first
            pipeline.prefetch(describe("backward", q, k, v, scale, causal), on)
        self.ready = pipeline.resolve(problem, on)
        self.out_shape = (*q.shape[:3], v.shape[3])
        strides = {"q": q.stride(), "k": k.stride(), "v": v.stride(), "out": _contiguous(self.out_shape)}
        self.constants = params.FORWARD.constants(_values(problem, strides))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_empty(self.out_shape)
        lse = torch.empty(self.out_shape[:3], dtype=torch.float32, device=q.device)
        pointers = _FORWARD_POINTERS.pack(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        _launch(self.ready, self.constants, pointers)
        return out, lse


class _Backward:
    """All backward calls of one kind."""

    def __init__(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float | None, causal: str
    ) -> None:
        problem = describe("backward", q, k, v, scale, causal)
        self.ready = pipeline.resolve(problem, target.detect(q.device.type))
        plan = self.ready.plan
        strides = {
            "q": q.stride(), "k": k.stride(), "v": v.stride(), "out": out.stride(), "grad_out": grad_out.stride(),
            "grad_q": _contiguous(q.shape), "grad_k": _contiguous(k.shape), "grad_v": _contiguous(v.shape),
        }  # fmt: skip
        self.constants = params.BACKWARD.constants(_values(problem, strides) | {"splits": plan.splits})
        self.workspace_bytes = self.ready.kernels[0].loaded.workspace_bytes(bytes(_BACKWARD_POINTERS.size) + self.constants)

    def __call__(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=q.device)
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        pointers = _BACKWARD_POINTERS.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), grad_out.data_ptr(),
            grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr(),
            lse.contiguous().data_ptr(), 0 if grad_lse is None else grad_lse.data_ptr(), workspace.data_ptr(),
        )  # fmt: skip
        _launch(self.ready, self.constants, pointers)
        return grad_q, grad_k, grad_v


def _launch(ready: Ready, constants: bytes, pointers: bytes) -> None:
    threads = torch.get_num_threads()
    for kernel, step in zip(ready.kernels, ready.plan.steps, strict=True):
        kernel.loaded.launch(step.blocks, constants, pointers, threads)


def _values(problem: Problem, strides: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A params.Table's constants by name."""
    names = ("batch", "head", "row", "dim")
    values = {f"{tensor}_{name}": s for tensor, each in strides.items() for name, s in zip(names, each, strict=True)}
    sizes = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "diagonal", "scale")
    return values | {name: getattr(problem, name) for name in sizes}


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


_Call = TypeVar("_Call", bound=Callable[..., Any])
_forwards: dict[Any, _Forward] = {}
_backwards: dict[Any, _Backward] = {}


def _remember(kept: dict[Any, _Call], key: Any, call: _Call) -> _Call:
    if len(kept) >= _KEPT:
        # Dropping one at a time would keep the work for the newest shapes only; this is rare and cheap to redo.
        kept.clear()
    kept[key] = call
    return call
