"""The float64 oracle and the one rule that says how far from it a result may be.

The rule: the largest error against float64 is at most TWICE that of the same computation made by PyTorch operations
with the tensors in the same dtype, or a floor of a few roundings, whichever is larger. It is applied twice, to
the errors as they are and to each row's errors relative to that row's own magnitude, so that a fault in rows of small
values does not hide below the rounding of large ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.cases import Case, Inputs, make_inputs

NAMES = ("out", "lse", "dq", "dk", "dv")

# The floor, in units of a result's natural magnitude (see ``exact``): what a correct kernel may differ by where the
# same-dtype computation happens to round luckily, as it does when a row has one key or all keys are equal. float16 and
# bfloat16 results are rounded once on output, the weights and their gradients once before a product, and the out that
# enters delta once: four half-units. float32 sums thousands of products in an order of its own and has its own exp2.
FLOOR = {
    torch.float64: 64 * torch.finfo(torch.float64).eps,
    torch.float32: 8 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
}

# A row whose magnitude is this far below its tensor's largest is judged as if it were not: weights there have
# underflowed.
SMALLEST_ROW = 2.0**-6


@dataclass(frozen=True)
class Problem:
    """What the oracle needs beside the tensors. diagonal is None when nothing is masked."""

    scale: float
    diagonal: int | None


@dataclass(frozen=True)
class Expected:
    """Per name of NAMES: the float64 value, its natural magnitude (same shape), and the same-dtype value."""

    value: dict[str, Tensor]
    magnitude: dict[str, Tensor]
    same_dtype: dict[str, Tensor]


def expect(inputs: Inputs, problem: Problem, *, backward: bool = True) -> Expected:
    """The results for these inputs, dout and dlse both being back-propagated."""
    value, magnitude = exact(inputs, problem)
    return Expected(value, magnitude, same_dtype(inputs, problem, backward=backward))


def exact(inputs: Inputs, problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Forward and backward in float64, by the textbook formulas.

    The second dictionary holds each result's magnitude: the root of the sum of the squared terms that make it up.
    Rounding errors of any sensible algorithm are a small multiple of eps times it, even where the terms cancel.
    """
    q, k, v, dout, dlse = (x.detach().to(torch.float64) for x in _tensors(inputs))
    heads_kv, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    scores = q @ k.mT * problem.scale
    hidden = _hidden(scores, problem.diagonal)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = weights @ v
    delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
    dweights = dout @ v.mT
    dscores = weights * (dweights - delta)

    # A float32 score, or LSE, of size x carries an error of x units, which is a relative error of the weights. Weights
    # and their gradients below the smallest normal number of the dtype keep no relative precision at all.
    limits, single = torch.finfo(inputs.q.dtype), torch.finfo(torch.float32)
    size_scores = (_norm(q, k.mT) * abs(problem.scale) + scores.abs()).masked_fill(hidden, 0.0)
    units = size_scores + lse.abs().masked_fill(lse.isinf(), 0.0)[..., None]
    size_weights = (weights * (1 + units * min(single.eps / limits.eps, 1.0))).clamp_min(limits.tiny)
    size_delta = (dout * out).square().sum(-1, keepdim=True).sqrt() + delta.abs() + dlse[..., None].abs()
    size_dscores = (size_weights * (_norm(dout, v.mT) + dweights.abs() + size_delta)).clamp_min(limits.tiny)
    value = {
        "out": out,
        "lse": lse,
        "dq": dscores @ k * problem.scale,
        "dk": _sum_group(dscores.mT @ q, heads_kv) * problem.scale,
        "dv": _sum_group(weights.mT @ dout, heads_kv),
    }
    size = {
        "out": _norm(size_weights, v),
        "lse": 1 + (size_scores.amax(-1) if size_scores.shape[-1] else size_scores.sum(-1)),
        # An error of delta is common to its row, so it does not average out over the keys.
        "dq": torch.hypot(_norm(size_dscores, k), size_delta * (weights @ k)) * abs(problem.scale),
        "dk": _sum_group(_norm(size_dscores.mT, q).square(), heads_kv).sqrt() * abs(problem.scale),
        "dv": _sum_group(_norm(size_weights.mT, dout).square(), heads_kv).sqrt(),
    }
    # A float32 sum of n terms, in order, loses about sqrt(n) / 4 units of their magnitude, and n / 4 units of itself
    # if the terms are all equal, since then each addition errs the same way. FLOOR covers few terms.
    coarse = min(single.eps / limits.eps, 1.0)
    for names, terms in ((("out", "dq"), max(k.shape[2], 1)), (("dk", "dv"), max(q.shape[2] * group, 1))):
        for name in names:
            total = value[name].abs()
            equal = (total / (size[name] * math.sqrt(terms)).clamp_min(limits.tiny)).clamp_max(1.0)
            size[name] = size[name] + coarse * (math.sqrt(terms) / 16 * size[name] + terms / 8 * equal * total)
    finite = {name: x.masked_fill(x.isinf(), 0.0) for name, x in value.items()}
    return value, {name: torch.hypot(finite[name], size[name]).clamp_min(limits.tiny) for name in NAMES}


def same_dtype(inputs: Inputs, problem: Problem, *, backward: bool = True) -> dict[str, Tensor]:
    """The same formulas by PyTorch operations and autograd with q, k, v, the weights and out in the inputs' dtype.

    Scores, their softmax and LSE are in float32 for float16 and bfloat16 inputs, as in PyTorch's own fused kernels:
    with scores rounded to bfloat16 the rule would allow anything where they are large.
    """
    q, k, v = (
        x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(backward)
        for x in (inputs.q, inputs.k, inputs.v)
    )
    group = q.shape[1] // max(k.shape[1], 1)
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ keys.to(wide).mT * problem.scale
    hidden = _hidden(scores, problem.diagonal)
    empty = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -math.inf).masked_fill(empty, 0.0)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0).to(q.dtype)
    out = weights @ values
    lse = torch.logsumexp(scores, -1).masked_fill(empty[:, 0], -math.inf)
    result = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse.to(wide)))
        result.update(zip(("dq", "dk", "dv"), grads, strict=True))
    return result


def check(name: str, got: Tensor, exact: Tensor, same_dtype: Tensor, magnitude: Tensor | None = None) -> None:
    """Raise AssertionError, naming the worst element, its index and the limit, unless got obeys the rule.

    ``got`` sets the dtype and so the floor; exact is float64; magnitude defaults to |exact|.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    if not exact.numel():
        return
    magnitude = exact.abs() if magnitude is None else magnitude
    infinite = exact.isinf()
    wrong = (got.to(torch.float64) != exact) & infinite | ~got.isfinite() & ~infinite
    if wrong.any():
        raise AssertionError(_message(name, got, exact, wrong.to(torch.float64), 0.5, "infinite or NaN, or not, in"))
    error = _error(got, exact, infinite)
    allowed = _error(same_dtype, exact, infinite).nan_to_num(0, 0, 0)
    largest = magnitude.amax().clamp_min(torch.finfo(torch.float32).tiny)
    rows = magnitude if name == "lse" else magnitude.amax(-1, keepdim=True)
    for unit, why in (
        (largest.expand_as(error), "too far from float64:"),
        (rows.clamp_min(SMALLEST_ROW * largest).expand_as(error), "too far from float64 for a row this small:"),
    ):
        limit = max(2 * (allowed / unit).max().item(), FLOOR[got.dtype])
        if (error / unit).max().item() > limit:
            index = _worst(error / unit)
            why = f"error {error[index].item():.3g}, limit {limit * unit[index].item():.3g}; {why}"
            raise AssertionError(_message(name, got, exact, error / unit, limit, why))


def check_all(got: dict[str, Tensor], expected: Expected, names: Iterable[str] = NAMES) -> None:
    for name in names:
        check(name, got[name], expected.value[name], expected.same_dtype[name], expected.magnitude[name])


def run(
    inputs: Inputs, attention: Callable[..., tuple[Tensor, Tensor]], *, backward: bool = True, **options: object
) -> dict[str, Tensor]:
    """Call ``attention(q, k, v, return_lse=True, **options)`` and its backward, with unwritten memory poisoned."""
    q, k, v = (x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
    with poisoned(inputs.q.numel(), inputs.k.numel(), inputs.v.numel(), inputs.dout.numel()):
        out, lse = attention(q, k, v, return_lse=True, **options)
        got = {"out": out.detach(), "lse": lse.detach()}
        if backward:
            grads = torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))
            got.update(zip(("dq", "dk", "dv"), grads, strict=True))
    return got


def verify(
    case: Case,
    attention: Callable[..., tuple[Tensor, Tensor]],
    *,
    names: Iterable[str] = NAMES,
    device: str | torch.device = "cpu",
    **options: object,
) -> None:
    """Run one case through ``attention`` and hold the named results to the rule."""
    names = tuple(names)
    inputs = make_inputs(case, device)
    backward = any(name.startswith("d") for name in names)
    got = run(inputs, attention, backward=backward, scale=case.scale, causal=case.causal, **options)
    for name in names:
        dtype = torch.promote_types(case.dtype, torch.float32) if name == "lse" else case.dtype
        assert got[name].dtype == dtype, f"{name} has dtype {got[name].dtype}, expected {dtype}"
    check_all(got, expect(inputs, Problem(case.softmax_scale, case.diagonal), backward=backward), names)


# Sizes of queries that make scores of about 2^22, 2^29, 2^33 and 2^44, and what takes them: kernels for 16-bit elements
# on a GPU know nothing of a head's magnitudes before they begin, and scale late (Scaling in attn/softmax.h).
COARSE = [(dtype, size) for size in (2.0**15, 2.0**22, 2.0**26, 2.0**37) for dtype in (torch.float32, torch.bfloat16)]
COARSE_GPU = [(dtype, size) for dtype, size in COARSE if dtype == torch.float32 or size < 2.0**26]


def verify_coarse(
    dtype: torch.dtype, size: float, attention: Callable[..., tuple[Tensor, Tensor]], device: str = "cpu"
) -> None:
    """Scores so large that the last bit of one is a weight's whole: a row takes the key of its largest score, whose
    LSE it has. The LSE is rounded too, so of the gradients only what no probability above 1 could give is known."""
    inputs = make_inputs(Case(dtype, heads_q=2, heads_kv=1, seq_q=90, seq_kv=200), device)
    inputs.q.zero_()[..., 0] = size
    inputs.k[0, 0, :, 0] = torch.randperm(200, device=device) - 100.0
    for causal in (False, "top_left"):
        got = run(inputs, attention, scale=0.75, causal=causal)
        visible = inputs.k[0, 0, :, 0].double().expand(90, 200)
        visible = visible.tril() - 1e9 * (1 - torch.ones_like(visible).tril()) if causal else visible
        top, key = visible.max(-1)
        torch.testing.assert_close(got["lse"].double(), (0.75 * size * top).expand(1, 2, 90), rtol=1e-6, atol=1.0)
        torch.testing.assert_close(
            got["out"], inputs.v[:, :, key].expand(1, 2, 90, -1), rtol=FLOOR[dtype], atol=FLOOR[dtype]
        )
        assert all(got[name].isfinite().all() for name in NAMES)
        assert (got["dv"].abs() <= 1.01 * inputs.dout.abs().sum((1, 2))).all()


@contextlib.contextmanager
def poisoned(*sizes: int) -> Iterator[None]:
    """Make memory that is allocated inside, and never written, show as NaN.

    torch's own switch fills what torch.empty and its kin return; blocks of each size are also filled with NaN and
    freed first, for memory that comes from the allocator another way.
    """
    for size in sizes:
        for width in (2, 4):
            block = torch.full((size * width // 4 + 1,), math.nan)
            del block
    switch: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        switch.fill_uninitialized_memory = before[1]


def _tensors(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse


def _hidden(scores: Tensor, diagonal: int | None) -> Tensor:
    """(Sq, Skv), True where row m may not see key n."""
    rows = torch.arange(scores.shape[-2], device=scores.device)[:, None]
    keys = torch.arange(scores.shape[-1], device=scores.device)
    return keys > rows + (scores.shape[-1] if diagonal is None else diagonal)


def _norm(a: Tensor, b: Tensor) -> Tensor:
    """Like a @ b, the root of the sum of the squared terms."""
    return (a.square() @ b.square()).sqrt()


def _sum_group(x: Tensor, heads_kv: int) -> Tensor:
    """Sum (B, Hq, S, D) over the query heads that share a key head."""
    return x.unflatten(1, (heads_kv, -1)).sum(2) if x.shape[1] else x.new_zeros(x.shape[0], heads_kv, *x.shape[2:])


def _error(got: Tensor, exact: Tensor, infinite: Tensor) -> Tensor:
    return (got.to(torch.float64) - exact).abs().masked_fill(infinite, 0.0)


def _worst(badness: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(badness.argmax(), badness.shape))


def _message(name: str, got: Tensor, exact: Tensor, badness: Tensor, limit: float, why: str) -> str:
    index = _worst(badness)
    count = int((badness > limit).sum())
    where = f"{name}{list(index)} is {got[index].item():.9g}, exactly {exact[index].item():.9g}"
    return f"{where}: {why} {count} of {badness.numel()} elements of shape {tuple(got.shape)}"
