"""Tensors -> outputs: the only place where tensors meet kernels.

What depends on shapes, strides and flags alone is worked out once and kept as a `Call`; a further call of that kind
allocates its outputs, packs their addresses and launches.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import params, pipeline, target
from .errors import JitattnError, Unsupported
from .pipeline import Launch, Ready
from .problem import DTYPES, Direction, Problem

__all__ = ["Call", "addresses", "backward", "check", "describe", "device_index", "forward", "prepare", "target_of"]

_KEPT = 4096  # kinds of calls that are remembered
_LOW_BITS = 15  # of an address: all that matters of it for loads of up to 16 bytes

_pack_forward = params.FORWARD.pack_pointers().pack
_pack_backward = params.BACKWARD.pack_pointers().pack
_is_deterministic = torch._C._get_deterministic_algorithms

_calls: dict[Any, Call] = {}


def prepare(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None, trains: bool = False
) -> Call:
    """What is known about all calls like this one, its forward kernel ready to launch.

    With `trains` the backward kernels are compiled as well, side by side with the forward and while it runs.

    :raises: what `check` and `pipeline.resolve` raise
    """
    of_gpu = None
    if q.is_cuda:
        deterministic = _is_deterministic() if deterministic is None else deterministic
        of_gpu = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & _LOW_BITS, deterministic
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, scale, causal, of_gpu,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None or (trains and not call.trains):
        if len(_calls) >= _KEPT:
            _calls.clear()  # dropping them one by one would cost every call; making them again is cheap
        call = _calls[key] = Call(q, k, v, scale, causal, deterministic, trains)
    return call


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, Sq, Dv) in q's dtype, contiguous, and the natural-log LSE (B, Hq, Sq) in float32."""
    return prepare(q, k, v, scale, causal, deterministic).forward(q, k, v)[:2]


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, causal: str, deterministic: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK and dV, contiguous, in the dtype and shape of q, k and v."""
    call = prepare(q, k, v, scale, causal, deterministic)
    at = q.data_ptr(), k.data_ptr(), v.data_ptr()
    return call.backward(grad_out, grad_lse, q, at, out.contiguous(), lse.contiguous())


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


def describe(
    direction: Direction, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str,
    deterministic: bool | None = None, bits: int = 0,
) -> Problem:  # fmt: skip
    """The problem that these tensors pose; `causal` is "none", "top_left" or "bottom_right".

    :param bits: what addresses of the tensors have set
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
        alignment=_alignment(bits, q, k, v),
        repeats=_repeats(q, k, v),
        deterministic=_is_deterministic() if deterministic is None else deterministic,
    )


def _alignment(bits: int, *tensors: Tensor) -> int:
    """See Problem.alignment. A dimension of size 1 has no step, whatever its stride says."""
    for x in tensors:
        size, stride = x.shape, x.stride()
        if size[3] > 1 and stride[3] != 1:
            return 1
        for i in range(3):
            if size[i] > 1:
                bits |= stride[i] * x.element_size()
    bits |= 16
    return bits & -bits


def _repeats(*tensors: Tensor) -> bool:
    """See Problem.repeats."""
    return any(size > 1 and stride == 0 for x in tensors for size, stride in zip(x.shape, x.stride(), strict=True))


def addresses(*tensors: Tensor) -> int:
    """What the addresses have set; tensors without memory (fake ones, those on "meta") count as aligned."""
    real = (x for x in tensors if type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta")
    return functools.reduce(int.__or__, (x.data_ptr() for x in real), 0)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def target_of(device: torch.device) -> target.Target:
    """What is compiled for on a device.

    :raises Unsupported: kernels for it do not exist in this version.
    """
    if device.type != "cuda":
        return target.detect(device.type)
    if torch.version.hip:
        raise Unsupported("kernels for AMD GPUs do not exist in this version: move the tensors to the cpu")
    return target.detect("cuda", *_gpu(device_index(device)))


@functools.cache
def _gpu(index: int) -> tuple[tuple[int, int], int]:
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def device_index(device: torch.device) -> int:
    """The number of a device among those of its kind; "cuda" alone is the current one."""
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if device.type == "cuda" else 0


class Call:
    """All calls with the shapes, strides and flags of one."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None,
        trains: bool,
    ) -> None:  # fmt: skip
        check(q, k, v)
        self.trains = trains
        self.options = scale, causal, deterministic
        self._on_gpu = q.is_cuda
        self._target, self._device = target_of(q.device), device_index(q.device)
        self._where = _where(q.device, self._device)
        problem = describe("forward", q, k, v, scale, causal, deterministic, addresses(q, k, v))
        self._problem = problem
        self._strides = {"q": q.stride(), "k": k.stride(), "v": v.stride()}
        self._out = _dense((*q.shape[:3], v.shape[3]))
        self._lse = _dense(tuple(q.shape[:3]))
        self._grads = tuple(_dense(tuple(x.shape)) for x in (q, k, v))
        if trains:
            pipeline.prefetch(problem, self._target)  # first, since it is needed first
            # On a GPU, as if the gradient to come and the output were as aligned as the rest, which they mostly are.
            pipeline.prefetch(replace(problem, direction="backward"), self._target)
        ready = self._resolve(problem)
        values = _values(problem, self._strides | {"out": self._out[1]}) | {"splits": ready.plan.splits}
        self._forward = ready.prepare(values, self._device)
        self._forward_workspace = _workspace_bytes(ready, self._forward)
        self._backward: dict[Any, tuple[tuple[Launch, ...], int]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
        """See the function `forward`; also the addresses of q, k and v."""
        out = q.new_empty_strided(*self._out)
        lse = q.new_empty_strided(*self._lse, dtype=torch.float32)
        workspace = None
        if self._forward_workspace:
            workspace = q.new_empty_strided((self._forward_workspace,), (1,), dtype=torch.uint8)
        at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        pointers = _pack_forward(*at, out.data_ptr(), lse.data_ptr(), 0 if workspace is None else workspace.data_ptr())
        for launch in self._forward:
            launch(pointers, self._where)
        return out, lse, at

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, at: tuple[int, int, int], out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the function `backward`; q, k and v are `at` these addresses, `out` and `lse` are contiguous."""
        out_at, grad_out_at = out.data_ptr(), grad_out.data_ptr()
        key = grad_out.stride()
        if self._on_gpu:
            key = key, (out_at | grad_out_at) & _LOW_BITS
        prepared = self._backward.get(key)
        if prepared is None:
            prepared = self._backward[key] = self._prepare_backward(out, grad_out)
        launches, workspace_bytes = prepared
        of_q, of_k, of_v = self._grads
        empty = q.new_empty_strided
        grad_q, grad_k, grad_v = empty(*of_q), empty(*of_k), empty(*of_v)
        workspace = empty((workspace_bytes,), (1,), dtype=torch.uint8) if workspace_bytes else None
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        pointers = _pack_backward(
            *at, out_at, grad_out_at,
            grad_q.data_ptr(), grad_k.data_ptr(), grad_v.data_ptr(), lse.data_ptr(),
            0 if grad_lse is None else grad_lse.data_ptr(), 0 if workspace is None else workspace.data_ptr(),
        )  # fmt: skip
        for launch in launches:
            launch(pointers, self._where)
        return grad_q, grad_k, grad_v

    def _prepare_backward(self, out: Tensor, grad_out: Tensor) -> tuple[tuple[Launch, ...], int]:
        alignment = min(self._problem.alignment, _alignment(addresses(out, grad_out), out, grad_out))
        repeats = self._problem.repeats or _repeats(grad_out)
        problem = replace(self._problem, direction="backward", alignment=alignment, repeats=repeats)
        ready = self._resolve(problem)
        grads = {f"grad_{name}": strides for name, (_, strides) in zip("qkv", self._grads, strict=True)}
        strides = self._strides | {"out": self._out[1], "grad_out": grad_out.stride()} | grads
        values = _values(problem, strides) | {"splits": ready.plan.splits}
        launches = ready.prepare(values, self._device)
        return launches, _workspace_bytes(ready, launches)

    def _resolve(self, problem: Problem) -> Ready:
        if (
            self._on_gpu
            and torch.cuda.is_current_stream_capturing()
            and not pipeline.is_ready(problem, self._target, self._device)
        ):
            raise JitattnError(
                f"{problem}: its kernels are not ready, and nothing can be loaded while a CUDA graph is captured. Call "
                f"jitattn.warmup((q, k, v, options)) before the capture, or the function itself once"
            )
        return pipeline.resolve(problem, self._target)


def _where(device: torch.device, index: int) -> Callable[[], int]:
    """What a launch asks where it runs; see pipeline.Launch."""
    if device.type == "cpu":
        return torch.get_num_threads
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)  # type: ignore[attr-defined]


def _workspace_bytes(ready: Ready, launches: tuple[Launch, ...]) -> int:
    return ready.plan.workspace_bytes + launches[0].workspace_bytes


def _values(problem: Problem, strides: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """A params.Table's constants by name."""
    names = ("batch", "head", "row", "dim")
    values = {f"{tensor}_{name}": s for tensor, each in strides.items() for name, s in zip(names, each, strict=True)}
    sizes = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "diagonal", "scale")
    return values | {name: getattr(problem, name) for name in sizes}


def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return shape, tuple(reversed(strides))
