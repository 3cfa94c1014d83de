"""The reference backend against the oracle, and the oracle and its rule against planted faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.reference import attention_reference
from tests import cases, oracle
from tests.cases import Case, Causal, make_inputs

CASES = cases.HEAD_DIMS[::4] + cases.SHAPES[::3] + cases.EMPTY + cases.LAYOUT_CASES[::2] + cases.VALUES


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool | str = False, return_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """attention_reference with the signature of jitattn.attention."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return attention_reference(q, k, v, scale=scale, causal=causal or None)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_obeys_the_rule(case: Case) -> None:
    oracle.verify(case, reference)


@pytest.mark.parametrize("case", [replace(case, dtype=torch.float64) for case in cases.SMOKE], ids=str)
def test_reference_in_float64_is_exact(case: Case) -> None:
    oracle.verify(case, reference)


@pytest.mark.parametrize("causal", [None, "none", "top_left", "bottom_right"])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)], ids=str)
def test_reference_twice_differentiable(causal: str | None, shape: tuple[int, int]) -> None:
    q = torch.randn(1, 2, shape[0], 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, shape[1], 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, shape[1], 3, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention_reference(q, k, v, scale=0.7, causal=causal)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # a finite difference of -inf is NaN

    assert torch.autograd.gradcheck(function, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v))


def test_reference_rows_with_nothing_to_attend() -> None:
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for n in (6, 4, 4))
    out, lse = attention_reference(q, k, v, scale=1.0, causal="bottom_right")
    assert torch.equal(out[:, :, :2], torch.zeros(1, 1, 2, 8))
    assert torch.equal(lse[:, :, :2], torch.full((1, 1, 2), -math.inf))
    ones = torch.ones_like
    first = torch.autograd.grad((out, lse), (q, k, v), (ones(out), ones(lse)), create_graph=True)
    assert torch.equal(first[0][:, :, :2], torch.zeros(1, 1, 2, 8))
    second = torch.autograd.grad([g.sum() for g in first], (q, k, v))
    assert all(g.isfinite().all() for g in first + second)


def test_reference_under_torch_func() -> None:
    q, k, v = (torch.randn(3, 2, 2, n, 4, dtype=torch.float64) for n in (5, 7, 7))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention_reference(q, k, v, scale=0.5, causal="bottom_right")
        return out.square().sum() + lse.sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        leaves = tuple(x[i].clone().requires_grad_() for x in (q, k, v))
        for ours, grad in zip(mapped, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(ours[i], grad)
    hessian = torch.func.hessian(loss)(q[0], k[0], v[0])
    assert hessian.shape == q[0].shape * 2 and hessian.isfinite().all()


def test_reference_refuses_an_unknown_alignment() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="top_left"):
        attention_reference(q, q, q, scale=1.0, causal="diagonal")


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_oracle_agrees_with_torch(causal: Causal) -> None:
    case = Case(torch.float64, batch=2, heads_q=4, heads_kv=2, seq_q=20, seq_kv=31, head_dim=8, causal=causal)
    inputs = make_inputs(case)
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    value, magnitude = oracle.exact(
        replace(inputs, dlse=torch.zeros_like(inputs.dlse)), oracle.Problem(case.softmax_scale, case.diagonal)
    )
    for name, tensor in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        torch.testing.assert_close(value[name], tensor, rtol=1e-12, atol=1e-12)
        assert (magnitude[name] >= value[name].abs()).all()


def test_case_names_are_unique() -> None:
    distinct = set(cases.ALL)
    assert len({str(case) for case in distinct}) == len(distinct), "two cases share a name, and so their values"


@pytest.mark.parametrize("layout", cases.LAYOUTS + cases.EXPANDED)
def test_layouts_keep_values_and_hide_nothing(layout: str) -> None:
    x = torch.randn(2, 3, 5, 7)
    y = cases.arrange(x, layout)
    assert y.shape == x.shape and y.isfinite().all()
    assert layout in cases.EXPANDED or torch.equal(x, y)
    for empty in ((0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (1, 1, 1, 1)):
        assert cases.arrange(torch.randn(empty), layout).shape == empty


def test_poison_shows_unwritten_memory() -> None:
    with oracle.poisoned(10):
        assert torch.empty(10).isnan().all()
        assert torch.ones(3, 4).new_empty(10, dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.ones(4, 2)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# Faults that kernels have had, each with a case of the list that must catch it and the result that shows it.


def _drops_last_key(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return reference(q, k[:, :, :-1], v[:, :, :-1], **options)


def _attends_past_the_end(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pad = (0, 0, 0, -k.shape[2] % 16)
    return reference(q, torch.nn.functional.pad(k, pad), torch.nn.functional.pad(v, pad), **options)


def _last_row_unwritten(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference(q, k, v, **options)
    return torch.cat([out[:, :, :-1], torch.empty_like(out[:, :, -1:])], 2), lse


def _interleaves_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return reference(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), **options)


def _one_head_of_a_group_in_dk(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys = torch.stack([k] + [k.detach()] * (group - 1), 2).flatten(1, 2)
    return reference(q, keys, v.repeat_interleave(group, 1), **options)


def _other_alignment(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    swapped = {"top_left": "bottom_right", "bottom_right": "top_left"}
    return reference(q, k, v, **{**options, "causal": swapped[options["causal"]]})


def _diagonal_hidden(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference(q[:, :, 1:], k[:, :, :-1], v[:, :, :-1], **options)
    first, first_lse = reference(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    return torch.cat([first, out], 2), torch.cat([first_lse, lse], 2)


def _lse_in_base_two(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference(q, k, v, **options)
    return out, lse / math.log(2)


def _drops_lse_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = reference(q, k, v, **options)
    return out, lse.detach() + 0 * q.sum()


def _no_running_maximum(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    weights = torch.exp(q.float() @ k.float().mT / math.sqrt(q.shape[-1]))
    total = weights.sum(-1)
    return (weights @ v.float() / total[..., None]).to(q.dtype), total.log()


def _rounds_scores(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    lse = reference(q, k, v, **options)[1]
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v, lse


FAULTS = (
    (_drops_last_key, "out", Case(torch.bfloat16, seq_q=2, seq_kv=2000, fill="edges")),
    (_drops_last_key, "out", Case(torch.bfloat16, seq_q=40, seq_kv=40, causal="top_left")),
    (_drops_last_key, "lse", Case(torch.bfloat16, seq_q=2, seq_kv=2000)),
    (_attends_past_the_end, "out", Case(torch.bfloat16, seq_kv=129)),
    (_last_row_unwritten, "out", Case(torch.float32)),
    (_interleaves_heads, "out", Case(torch.bfloat16, heads_q=4, heads_kv=2)),
    (_one_head_of_a_group_in_dk, "dk", Case(torch.bfloat16, heads_q=4, heads_kv=2)),
    (_other_alignment, "out", Case(torch.bfloat16, causal="bottom_right")),
    (_diagonal_hidden, "out", Case(torch.bfloat16, seq_q=64, seq_kv=64, causal="top_left")),
    (_lse_in_base_two, "lse", Case(torch.float32)),
    (_drops_lse_gradient, "dq", Case(torch.bfloat16)),
    (_drops_lse_gradient, "dk", Case(torch.float32)),
    (_no_running_maximum, "out", Case(torch.float32, fill="high")),
    (_no_running_maximum, "lse", Case(torch.bfloat16, fill="low")),
    (_rounds_scores, "out", Case(torch.bfloat16, fill="low")),
)


@pytest.mark.parametrize(("fault", "name", "case"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_rule_catches(fault: Callable[..., tuple[Tensor, Tensor]], name: str, case: Case) -> None:
    with pytest.raises(AssertionError, match=rf"^{name}\["):
        oracle.verify(case, fault, names=[name])


def test_reference_backend_obeys_the_rule() -> None:
    for case in cases.SMOKE:
        oracle.verify(case, jitattn.attention, backend="reference")
