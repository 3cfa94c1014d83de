"""The public functions: check what was asked for, normalise it, call the op."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from . import ops
from .errors import Unsupported
from .launch import check
from .reference import attention_reference

__all__ = ["attention"]

Causal = bool | Literal["top_left", "bottom_right"]
Window = int | tuple[int, int]

# Options of the interface that no kernel of this version has: name -> what to do instead.
_NOT_YET = {
    "window": "pass the band to torch's SDPA as attn_mask",
    "softcap": "apply it to scores of your own with plain torch operations",
    "alibi_slopes": "pass the bias to torch's SDPA as attn_mask",
    "bias": "pass it to torch's SDPA as attn_mask",
    "mask": "pass it to torch's SDPA as attn_mask",
    "sink": "scale the output by sigmoid(lse - sink), with the LSE of return_lse=True",
    "score_mod": "call torch's flex_attention",
    "block_mask": "call torch's flex_attention",
    "dropout_p": "pass it to torch's SDPA",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: Causal = False,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention: softmax(scale Q K^T) V, differentiable in q, k and v.

    :param q: (B, Hq, Sq, D), float32, bfloat16 or float16, any strides
    :param k: (B, Hkv, Skv, D); query head h attends to head h // (Hq / Hkv)
    :param v: (B, Hkv, Skv, Dv)
    :param scale: of the scores; 1 / sqrt(D) by default
    :param causal: False; "top_left" (row m sees keys n <= m); "bottom_right" (n <= m + Skv - Sq); True where Sq == Skv,
        so that the two are the same
    :param return_lse: also return each row's natural-log-sum-exp of the scores, differentiable like the output
    :param deterministic: True asks for gradients that are bitwise equal run after run, None for them where
        torch.are_deterministic_algorithms_enabled(). Those of the host always are; a GPU's take longer then
    :param backend: None (from the device), "host", "cuda", or "reference": plain torch operations, quadratic in memory,
        also in float64, differentiable any number of times
    :returns: out (B, Hq, Sq, Dv), contiguous, in q's dtype; with `return_lse`, (out, lse) with lse (B, Hq, Sq) in
        float32. A row that sees no key has out 0, LSE -inf and zero gradients.
    :raises ValueError: arguments that do not fit together
    :raises Unsupported: an option, dtype, device or derivative that this version does not have; the message names the
        nearest thing that it has

    The remaining options are part of the interface and refused until a kernel has them.

    On GPUs float32 products are sums of three float16 products of scaled halves (Ootomo and Yokota 2022), as exact as
    float32 for finite values that are at least 2^-29 of the largest of their head; infinite ones in q or k give NaN.
    In float16 and bfloat16 on GPUs, rows with scores of 1e9 or more may come out as NaN.

    The algorithm is FlashAttention-2's: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023, https://arxiv.org/abs/2307.08691.
    """
    if (
        window is not None or softcap or alibi_slopes is not None or bias is not None or mask is not None
        or sink is not None or score_mod is not None or block_mask is not None or dropout_p
    ):  # fmt: skip
        refuse(
            window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sink=sink,
            score_mod=score_mod, block_mask=block_mask, dropout_p=dropout_p,
        )  # fmt: skip
    alignment = "none" if causal is False else align(causal, q, k)
    if backend is None:
        out, lse = ops.attention(q, k, v, scale, alignment, deterministic)
    else:
        out, lse = _on(backend)(q, k, v, scale, alignment, deterministic)
    return (out, lse) if return_lse else out


def align(causal: Any, q: Tensor, k: Tensor) -> str:
    """The causal alignment as the op takes it: "none", "top_left" or "bottom_right"."""
    if causal is False:
        return "none"
    if causal is True:
        seq_q, seq_kv = q.shape[-2], k.shape[-2]
        if seq_q != seq_kv:
            raise ValueError(
                f"causal=True is ambiguous for {seq_q} queries and {seq_kv} keys, since libraries disagree about it: "
                f'say causal="top_left" (as torch does) or causal="bottom_right" (as FlashAttention does)'
            )
        return "top_left"
    if causal in ("top_left", "bottom_right"):
        return causal
    raise ValueError(f'causal must be False, True, "top_left" or "bottom_right", not {causal!r}')


# Backend -> the type of the devices whose tensors it takes.
_DEVICES = {"host": "cpu", "cuda": "cuda"}


def _on(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    if backend == "reference":
        return _reference
    if backend in _DEVICES:
        return functools.partial(_kernels, backend)
    if backend == "hip":
        raise Unsupported('backend "hip" does not exist in this version: there are "host", "cuda" and "reference"')
    raise ValueError(f'backend must be None, "host", "cuda" or "reference", not {backend!r}')


def _kernels(backend: str, q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    if q.device.type != _DEVICES[backend]:
        raise ValueError(f"backend {backend!r} takes tensors on {_DEVICES[backend]!r} devices, but q is on {q.device}")
    return ops.attention(q, *arguments)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, deterministic: bool | None
) -> tuple[Tensor, Tensor]:
    if q.dtype != torch.float64:
        check(q, k, v)
    return attention_reference(q, k, v, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale, causal=causal)


def refuse(**options: Any) -> None:
    """Raise if any of the options that no kernel has yet is in use."""
    for name, value in options.items():
        if name in _NOT_YET and value is not None and (name not in _OFF_AT_ZERO or value):
            raise Unsupported(f"{name} is not supported by the kernels of this version: {_NOT_YET[name]}")


_OFF_AT_ZERO = ("softcap", "dropout_p")
