"""Tensors -> outputs: the only place where tensors meet kernels.

What depends on shapes, strides and flags alone is worked out once and kept as a `Call`; a further call of that kind
allocates its outputs, packs their addresses and launches.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import torch
from torch import Tensor

from . import params, pipeline, target
from .errors import Unsupported
from .pipeline import Launch
from .problem import DTYPES, Direction, Problem

__all__ = ["Call", "backward", "check", "describe", "forward", "prepare"]

_KEPT = 4096  # kinds of calls that are remembered

_pack_forward = params.FORWARD.pack_pointers().pack
_pack_backward = params.BACKWARD.pack_pointers().pack

_calls: dict[Any, Call] = {}


def prepare(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, trains: bool = False) -> Call:
    """What is known about all calls like this one, its forward kernel ready to launch.

    With `trains` the backward kernels are compiled as well, side by side with the forward and while it runs.

    :raises: what `check` and `pipeline.resolve` raise
    """
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, scale, causal,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or (trains and not call.trains):
        if len(_calls) >= _KEPT:
            _calls.clear()  # dropping them one by one would cost every call; making them again is cheap
        call = _calls[key] = Call(q, k, v, scale, causal, trains)
    return call


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in float32."""
    return prepare(q, k, v, scale, causal).forward(q, k, v)


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, causal: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV, contiguous, in the dtype and shape of q, k and v."""
    out = out if out.stride(3) == 1 else out.contiguous()
    return prepare(q, k, v, scale, causal).backward(grad_out, grad_lse, q, k, v, out, lse.contiguous())


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
    """The problem that these tensors pose; `causal` is "none", "top_left" or "bottom_right".

    :raises TypeError: a scale that is no number. A tensor is none: its value could change behind a remembered call.
    """
    if scale is not None and not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be None or a number, not {type(scale).__name__}")
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
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
    )


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Call:
    """All calls with the shapes, strides and flags of one."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, trains: bool) -> None:
        check(q, k, v)
        self.trains = trains
        self.options = scale, causal
        self._target = target.detect(q.device.type)
        self._problem = describe("forward", q, k, v, scale, causal)
        self._backward_problem = describe("backward", q, k, v, scale, causal)
        self._strides = {"q": q.stride(), "k": k.stride(), "v": v.stride()}
        self._shapes = q.shape, k.shape, v.shape
        self._out_shape = (*q.shape[:3], v.shape[3])
        if trains:
            pipeline.prefetch(self._problem, self._target)  # first, since it is needed first
            pipeline.prefetch(self._backward_problem, self._target)
        strides = self._strides | {"out": _contiguous(self._out_shape)}
        parameters = params.FORWARD.parameters(_values(self._problem, strides))
        (self._forward,) = pipeline.resolve(self._problem, self._target).prepare(parameters)
        self._backwards: dict[Any, tuple[tuple[Launch, ...], int]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See the function `forward`."""
        out = q.new_empty(self._out_shape)
        lse = torch.empty(self._out_shape[:3], dtype=torch.float32, device=q.device)
        self._forward(
            _pack_forward(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr()),
            torch.get_num_threads,
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the function `backward`."""
        strides = (out.stride(), grad_out.stride())
        prepared = self._backwards.get(strides)
        if prepared is None:
            prepared = self._backwards[strides] = self._prepare_backward(*strides)
        launches, workspace_bytes = prepared
        grad_q, grad_k, grad_v = map(q.new_empty, self._shapes)
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device) if workspace_bytes else None
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        pointers = _pack_backward(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), grad_out.data_ptr(),
            grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr(), lse.data_ptr(),
            0 if grad_lse is None else grad_lse.data_ptr(), 0 if workspace is None else workspace.data_ptr(),
        )  # fmt: skip
        for launch in launches:
            launch(pointers, torch.get_num_threads)
        return grad_q, grad_k, grad_v

    def _prepare_backward(self, out: tuple[int, ...], grad_out: tuple[int, ...]) -> tuple[tuple[Launch, ...], int]:
        grads = dict(zip(("grad_q", "grad_k", "grad_v"), map(_contiguous, self._shapes), strict=True))
        strides = self._strides | {"out": out, "grad_out": grad_out} | grads
        ready = pipeline.resolve(self._backward_problem, self._target)
        values = _values(self._backward_problem, strides) | {"splits": ready.plan.splits}
        launches = ready.prepare(params.BACKWARD.parameters(values))
        return launches, launches[0].workspace_bytes


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
