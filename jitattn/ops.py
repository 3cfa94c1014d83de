"""The torch.library ops, their fakes and their autograd: the only file that knows torch's dispatcher.

A plain eager call goes straight to the kernels; everything that watches or rewrites calls (torch.compile, fake tensors,
functorch, dispatch modes, forward-mode AD) sees the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from . import launch
from .errors import Unsupported

__all__ = ["attention"]

_library = Library("jitattn", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, float? scale, str causal, bool? deterministic=None) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " float? scale, str causal, bool? deterministic=None) -> (Tensor, Tensor, Tensor)"
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out and LSE, differentiable. `causal` is "none", "top_left" or "bottom_right"."""
    if _is_compiling() or _is_watched(q, k, v):
        return torch.ops.jitattn.attention(q, k, v, scale, causal, deterministic)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _apply(q, k, v, launch.prepare(q, k, v, scale, causal, deterministic, True))
    out, lse, _ = launch.prepare(q, k, v, scale, causal, deterministic).forward(q, k, v)
    return out, lse


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_is_compiling = torch.compiler.is_compiling
_dispatch_modes, _in_functorch = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def _is_watched(*tensors: Tensor) -> bool:
    """Whether something stands between this call and plain tensors."""
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg():
            return True
    return _dispatch_modes() > 0 or _in_functorch() or forward_ad._current_level >= 0


class _Attention(torch.autograd.Function):
    """Forward and backward of plain tensors tied together."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: launch.Call) -> tuple[Tensor, Tensor]:
        out, lse, ctx.at = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # the LSE is seldom differentiated
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        grad_out = _grad_out(grad_out, grad_lse, saved)
        if grad_out is None:
            return None, None, None, None
        if torch.is_grad_enabled() or _is_watched(grad_out):
            # The caller may go on to differentiate these gradients, or watches them: that is the op's business.
            found = torch.ops.jitattn.attention_backward(grad_out, grad_lse, *saved, *ctx.call.options)
        else:
            q, k, v, out, lse = saved
            if (q.data_ptr(), k.data_ptr(), v.data_ptr()) == ctx.at:
                found = ctx.call.backward(grad_out, grad_lse, q, ctx.at, out, lse)
            else:
                # Saved-tensor hooks gave other tensors back, whose strides may differ.
                found = launch.backward(grad_out, grad_lse, *saved, *ctx.call.options)
        return (*found, None)


# Function.apply first looks for functorch's transforms in the arguments, as `attention` has already done.
_apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Attention).apply  # type: ignore[misc]


class _AttentionOp(torch.autograd.Function):
    """The same for what the op is called with."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.jitattn.attention(q, k, v, scale, causal, deterministic)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = scale, causal, deterministic
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        grad_out = _grad_out(grad_out, grad_lse, saved)
        if grad_out is None:
            return None, None, None, None, None, None
        found = torch.ops.jitattn.attention_backward(grad_out, grad_lse, *saved, *ctx.options)
        return (*found, None, None, None)


def _grad_out(grad_out: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> Tensor | None:
    """The output's gradient, zeros if only the LSE has one, None if neither has."""
    return torch.zeros_like(saved[3]) if grad_out is None and grad_lse is not None else grad_out


class _GradientsOnce(torch.autograd.Function):
    """The gradients, with a clear error where their own gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.jitattn.attention_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise Unsupported(
            "jitattn kernels have no second derivative; for double backward call "
            'jitattn.attention(..., backend="reference"), which is differentiable any number of times'
        )


def _fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None = None
) -> tuple[Tensor, Tensor]:
    launch.check(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


for _device in ("CPU", "CUDA"):
    _library.impl("attention", launch.forward, _device)
    _library.impl("attention_backward", launch.backward, _device)
_library.impl("attention", lambda *arguments: _AttentionOp.apply(*arguments), "Autograd")
_library.impl("attention_backward", lambda *arguments: _GradientsOnce.apply(*arguments), "Autograd")
torch.library.register_fake("jitattn::attention", _fake, lib=_library)
torch.library.register_fake("jitattn::attention_backward", _fake_backward, lib=_library)
