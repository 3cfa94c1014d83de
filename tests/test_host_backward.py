"""Backward on the host backend: numbers, which gradients are made, reproducibility, autograd's rules."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from tests import cases, oracle
from tests.cases import Case, make_inputs

GRADS = ("dq", "dk", "dv")


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_backward(case: Case) -> None:
    oracle.verify(case, jitattn.attention, names=GRADS)


def _leaves(inputs: cases.Inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return q, k, v


@pytest.mark.parametrize("case", cases.SMOKE, ids=str)
@pytest.mark.parametrize("used", ["out", "lse", "out alone"])
def test_only_one_result_has_a_gradient(case: Case, used: str) -> None:
    inputs = make_inputs(case)
    q, k, v = _leaves(inputs)
    options: dict[str, Any] = {"scale": case.scale, "causal": case.causal}
    with oracle.poisoned(q.numel(), k.numel(), v.numel()):
        if used == "out alone":
            out = jitattn.attention(q, k, v, **options)
            grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
        else:
            out, lse = jitattn.attention(q, k, v, return_lse=True, **options)
            chosen = (out, inputs.dout) if used == "out" else (lse, inputs.dlse)
            grads = torch.autograd.grad(chosen[0], (q, k, v), chosen[1], materialize_grads=True)
    dout = torch.zeros_like(inputs.dout) if used == "lse" else inputs.dout
    dlse = inputs.dlse if used == "lse" else torch.zeros_like(inputs.dlse)
    problem = oracle.Problem(case.softmax_scale, case.diagonal)
    expected = oracle.expect(replace(inputs, dout=dout, dlse=dlse), problem)
    oracle.check_all(dict(zip(GRADS, grads, strict=True)), expected, GRADS)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_sum_backward(dtype: torch.dtype) -> None:
    """The gradient of a sum is one element with stride 0 everywhere."""
    inputs = make_inputs(Case(dtype, seq_q=50, seq_kv=70))
    q, k, v = _leaves(inputs)
    jitattn.attention(q, k, v).sum().backward()
    grads = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
    ones = replace(inputs, dout=torch.ones_like(inputs.dout), dlse=torch.zeros_like(inputs.dlse))
    expected = oracle.expect(ones, oracle.Problem(0.125, None))
    for name, grad in grads.items():
        assert grad is not None and grad.dtype == dtype
        oracle.check(name, grad, expected.value[name], expected.same_dtype[name], expected.magnitude[name])


@pytest.mark.parametrize("subset", [s for n in (1, 2) for s in itertools.combinations(range(3), n)], ids=str)
@pytest.mark.parametrize("case", cases.SMOKE[:3:2], ids=str)
def test_gradients_of_some_inputs_only(case: Case, subset: tuple[int, ...]) -> None:
    inputs = make_inputs(case)
    everything = oracle.run(inputs, jitattn.attention, causal=case.causal)
    tensors = [inputs.q.detach(), inputs.k.detach(), inputs.v.detach()]
    for index in subset:
        tensors[index] = tensors[index].clone().requires_grad_()
    with oracle.poisoned(*(x.numel() for x in tensors)):
        out, lse = jitattn.attention(*tensors, causal=case.causal, return_lse=True)
        torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
    for index, name in enumerate(GRADS):
        grad = tensors[index].grad
        assert (grad is not None) == (index in subset)
        if grad is not None:
            torch.testing.assert_close(grad, everything[name])


def test_non_leaf_inputs() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 40, 3 * 4 * 16, requires_grad=True)

    def loss(attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = x.sin().unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return attend(q, k, v).transpose(1, 2).flatten(2).square().sum()

    ours = torch.autograd.grad(loss(lambda q, k, v: jitattn.attention(q, k, v, causal=True)), x)[0]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs = torch.autograd.grad(loss(lambda q, k, v: sdpa(q, k, v, is_causal=True)), x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_same_tensor_as_q_k_and_v() -> None:
    x = torch.randn(1, 2, 70, 64, requires_grad=True)
    ours = torch.autograd.grad(jitattn.attention(x, x, x).square().sum(), x)[0]
    theirs = torch.autograd.grad(jitattn.attention(x, x, x, backend="reference").square().sum(), x)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_and_keys_that_take_no_part_have_zero_gradients() -> None:
    got = oracle.run(make_inputs(Case(seq_q=100, seq_kv=30)), jitattn.attention, causal="bottom_right")
    assert (got["dq"][:, :, :70] == 0).all() and all(got[name].isfinite().all() for name in GRADS)
    got = oracle.run(make_inputs(Case(seq_q=30, seq_kv=100)), jitattn.attention, causal="top_left")
    assert (got["dk"][:, :, 30:] == 0).all() and (got["dv"][:, :, 30:] == 0).all()


@pytest.mark.parametrize(("dtype", "size"), oracle.COARSE, ids=str)
def test_scores_whose_rounding_is_coarse(dtype: torch.dtype, size: float) -> None:
    oracle.verify_coarse(dtype, size, jitattn.attention)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        Case(torch.float32, batch=2, heads_q=4, heads_kv=2, seq_q=300, seq_kv=333, causal="bottom_right"),
        Case(torch.bfloat16, heads_q=6, heads_kv=1, seq_q=257, seq_kv=500),
        Case(torch.float32, heads_q=1, heads_kv=1, seq_q=1000, seq_kv=700),
    ],
    ids=str,
)
def test_bitwise_reproducible(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    inputs = make_inputs(case)
    first = oracle.run(inputs, jitattn.attention, causal=case.causal)
    for deterministic in (None, True, False):
        again = oracle.run(inputs, jitattn.attention, causal=case.causal, deterministic=deterministic)
        for name in oracle.NAMES:
            assert torch.equal(first[name], again[name]), name


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("case", cases.SMOKE[:3], ids=str)
def test_any_number_of_torch_threads(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    oracle.verify(case, jitattn.attention, names=GRADS)


def test_backward_twice_through_a_retained_graph() -> None:
    q, k, v = _leaves(make_inputs(Case(seq_q=20, seq_kv=20)))
    out = jitattn.attention(q, k, v)
    ones = torch.ones_like(out)
    first = torch.autograd.grad(out, (q, k, v), ones, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), ones)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time|freed"):
        torch.autograd.grad(out, (q, k, v), ones)


@pytest.mark.parametrize("which", ["q", "k", "v", "out", "lse"])
def test_a_changed_tensor_is_an_error_or_does_not_matter(which: str) -> None:
    q, k, v = _leaves(make_inputs(Case(seq_q=20, seq_kv=20)))
    tensors = {"q": q * 1, "k": k * 1, "v": v * 1}
    out, lse = jitattn.attention(tensors["q"], tensors["k"], tensors["v"], return_lse=True)
    expected = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v), retain_graph=True)
    loss = out.sum() + lse.sum()
    changed: Tensor = {**tensors, "out": out, "lse": lse}[which]
    try:
        with torch.no_grad():
            changed.mul_(3)
        got = torch.autograd.grad(loss, (q, k, v))
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)
        return
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_gradients_that_negate_lazily() -> None:
    """torch keeps the sign of such a view as a bit beside the memory."""
    q, k, v = _leaves(make_inputs(Case(seq_q=20, seq_kv=20)))
    out, lse = jitattn.attention(q, k, v, return_lse=True)
    dout = torch.randn(out.shape, dtype=torch.complex64).conj().imag
    dlse = torch.randn(lse.shape, dtype=torch.complex64).conj().imag
    assert dout.is_neg() and dlse.is_neg()
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout.clone(), dlse.clone()), retain_graph=True)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_training_step_learns_as_with_sdpa() -> None:
    """Twenty steps of a small model end at the same loss, which no single wrong gradient survives."""

    def losses(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[float]:
        torch.manual_seed(0)
        embed, project = torch.nn.Embedding(17, 64), torch.nn.Linear(64, 3 * 64)
        head = torch.nn.Linear(64, 17)
        parameters = [*embed.parameters(), *project.parameters(), *head.parameters()]
        optimizer = torch.optim.Adam(parameters, 1e-2)
        tokens = torch.randint(17, (4, 49))
        history = []
        for _ in range(20):
            q, k, v = project(embed(tokens[:, :-1])).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            logits = head(attend(q, k, v).transpose(1, 2).flatten(2))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = losses(lambda q, k, v: jitattn.attention(q, k, v, causal=True))
    theirs = losses(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    assert ours[-1] < ours[0] - 0.5
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=1e-3)


def test_a_process_that_ends_before_its_backward_is_compiled(run_python: Callable[..., str], tmp_path: Any) -> None:
    """The backward starts to compile during the forward; leaving then neither hangs nor fails."""
    script = (
        "import torch, jitattn\n"
        "x = torch.randn(1, 1, 8, 27, requires_grad=True)\n"
        "print(jitattn.attention(x, x, x).shape)\n"
    )
    start = time.monotonic()
    assert "[1, 1, 8, 27]" in run_python(script, JITATTN_CACHE_DIR=str(tmp_path))
    assert time.monotonic() - start < 60
