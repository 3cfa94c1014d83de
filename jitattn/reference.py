"""Exact attention in plain torch operations: ``backend="reference"``.

It materialises the (Sq, Skv) scores, so it is for checking and for higher derivatives, not for speed. Being made of
ordinary differentiable operations it can be differentiated any number of times, in reverse and forward mode, and
runs under ``torch.func`` transforms, on any device and in float64 too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Hq, Sq, D) over k (B, Hkv, Skv, D) and v (B, Hkv, Skv, Dv), Hq a multiple of Hkv.

    Returns out (B, Hq, Sq, Dv) in q's dtype and the natural-log LSE (B, Hq, Sq), float64 for float64 inputs and
    float32 for all others. float16 and bfloat16 are computed in float32, other dtypes in their own precision.

    ``causal`` is None or "none" (every key), "top_left" (row m sees keys n <= m) or "bottom_right"
    (n <= m + Skv - Sq). A row that sees no key gives out 0, LSE -inf and zero gradients.
    Raises ValueError for any other ``causal``.
    """
    batch, heads_q, seq_q, _ = q.shape
    heads_kv, seq_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads_q // heads_kv if heads_kv else 1
    diagonal = _diagonal(causal, seq_q, seq_kv)

    compute = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    # The query heads that share a key head are folded into the rows, so that K and V are never repeated in memory.
    rows = q.to(compute).reshape(batch, heads_kv, group * seq_q, q.shape[3])
    scores = torch.matmul(rows, k.to(compute).transpose(-2, -1)) * scale
    scores = scores.reshape(batch, heads_kv, group, seq_q, seq_kv)

    if diagonal is None:
        weights = torch.softmax(scores, -1)
        lse = torch.logsumexp(scores, -1)
    else:
        row = torch.arange(seq_q, device=q.device)[:, None]
        visible = torch.arange(seq_kv, device=q.device) <= row + diagonal
        empty = row[:, 0] + diagonal < 0
        # An empty row is given harmless finite scores before the softmax and is blanked after it: where() stops the
        # gradient of the branch not taken only if that branch's own derivative is finite.
        scores = scores.masked_fill(~visible, -math.inf).masked_fill(empty[:, None], 0.0)
        weights = torch.softmax(scores, -1).masked_fill(empty[:, None], 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(empty, -math.inf)

    weights = weights.reshape(batch, heads_kv, group * seq_q, seq_kv)
    out = torch.matmul(weights, v.to(compute)).to(q.dtype)
    return out.reshape(batch, heads_q, seq_q, head_dim_v), lse.reshape(batch, heads_q, seq_q)


def _diagonal(causal: str | None, seq_q: int, seq_kv: int) -> int | None:
    """The last key that row 0 sees, or None when every row sees every key."""
    if causal is None or causal == "none":
        return None
    if causal == "top_left":
        return 0
    if causal == "bottom_right":
        return seq_kv - seq_q
    raise ValueError(f'causal must be None, "none", "top_left" or "bottom_right", not {causal!r}')
