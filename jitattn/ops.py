"""The torch.library ops, their fakes and their autograd: the only file that knows torch's dispatcher.

A plain eager call goes straight to the kernels; everything that watches or rewrites calls (torch.compile, fake tensors,
functorch, dispatch modes, forward-mode AD) sees the ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

from . import launch
from .errors import Unsupported

__all__ = ["attention"]

_library = Library("jitattn", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, float? scale, str causal) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " float? scale, str causal) -> (Tensor, Tensor, Tensor)"
)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str) -> tuple[Tensor, Tensor]:
    """out and LSE, differentiable. `causal` is "none", "top_left" or "bottom_right"."""
    if torch.compiler.is_compiling() or _is_watched(q, k, v):
        return torch.ops.jitattn.attention(q, k, v, scale, causal)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return _Attention.apply(q, k, v, scale, causal, True)  # type: ignore[no-any-return]
    return launch.forward(q, k, v, scale, causal)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _is_watched(*tensors: Tensor) -> bool:
    """Whether something stands between this call and plain tensors."""
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg():
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


class _Attention(torch.autograd.Function):
    """Forward and backward tied together. `is_plain`: the inputs are known not to be watched."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, is_plain: bool
    ) -> tuple[Tensor, Tensor]:
        if is_plain:
            out, lse = launch.forward(q, k, v, scale, causal, True)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = torch.ops.jitattn.attention(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)  # the LSE is seldom differentiated
        ctx.options = scale, causal
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            if grad_lse is None:
                return None, None, None, None, None, None
            grad_out = torch.zeros_like(out)
        # The caller may go on to differentiate these gradients: an error only if it really does.
        once_more = _GradientsOnce.apply if torch.is_grad_enabled() else _backward
        grad_q, grad_k, grad_v = once_more(grad_out, grad_lse, q, k, v, out, lse, *ctx.options)
        return grad_q, grad_k, grad_v, None, None, None


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    if _is_watched(grad_out, rest[0]):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.jitattn.attention_backward(grad_out, grad_lse, *rest)
    return launch.backward(grad_out, grad_lse, *rest)


class _GradientsOnce(torch.autograd.Function):
    """The gradients, with a clear error where their own gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise Unsupported(
            "jitattn kernels have no second derivative; for double backward call "
            'jitattn.attention(..., backend="reference"), which is differentiable any number of times'
        )


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str) -> tuple[Tensor, Tensor]:
    launch.check(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_library.impl("attention", launch.forward, "CPU")
_library.impl("attention_backward", launch.backward, "CPU")
_library.impl("attention", lambda *arguments: _Attention.apply(*arguments, False), "Autograd")
_library.impl("attention_backward", lambda *arguments: _GradientsOnce.apply(*arguments), "Autograd")
torch.library.register_fake("jitattn::attention", _fake, lib=_library)
torch.library.register_fake("jitattn::attention_backward", _fake_backward, lib=_library)
