"""Forward on the host backend: numbers, memory, values that are not finite, instruction sets."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import target
from jitattn.errors import JitattnError
from tests import cases, oracle
from tests.cases import Case, make_inputs

MISUSE = (ValueError, TypeError, JitattnError)


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_forward(case: Case) -> None:
    oracle.verify(case, jitattn.attention, names=("out", "lse"))


@pytest.mark.parametrize("case", cases.SMOKE, ids=str)
def test_the_same_out_with_and_without_lse_and_gradients(case: Case) -> None:
    inputs = make_inputs(case)
    options: dict[str, Any] = {"scale": case.scale, "causal": case.causal}
    plain = jitattn.attention(inputs.q, inputs.k, inputs.v, **options)
    with_lse, _ = jitattn.attention(inputs.q, inputs.k, inputs.v, return_lse=True, **options)
    named = jitattn.attention(inputs.q, inputs.k, inputs.v, backend="host", **options)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    with_graph = jitattn.attention(leaves[0], leaves[1], leaves[2], **options)
    with torch.inference_mode():
        inference = jitattn.attention(inputs.q, inputs.k, inputs.v, **options)
    assert with_graph.requires_grad and not plain.requires_grad
    for other in (with_lse, named, with_graph.detach(), inference):
        assert torch.equal(plain, other)


@pytest.mark.parametrize("layout", cases.LAYOUTS + cases.EXPANDED)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_outputs_are_contiguous_in_the_inputs_dtype(layout: str, dtype: torch.dtype) -> None:
    case = Case(dtype, batch=2, heads_q=4, seq_q=9, seq_kv=12, head_dim_v=64, layouts=cases.all_layouts(layout))
    inputs = make_inputs(case)
    out, lse = jitattn.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert out.shape == (2, 4, 9, 64) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert torch.equal(out, jitattn.attention(inputs.q, inputs.k, inputs.v)), "not reproducible"


@pytest.mark.parametrize("causal", [False, True])
def test_causal_true_is_both_alignments_of_a_square(causal: bool) -> None:
    inputs = make_inputs(Case(seq_q=70, seq_kv=70))
    out = jitattn.attention(inputs.q, inputs.k, inputs.v, causal=causal)
    for name in ("top_left", "bottom_right"):
        assert torch.equal(out, jitattn.attention(inputs.q, inputs.k, inputs.v, causal=name)) == causal


@pytest.mark.parametrize("layout", ["bhsd", "padded", "strided", "packed"])
def test_inputs_and_the_memory_around_them_are_left_alone(layout: str) -> None:
    case = Case(torch.bfloat16, seq_q=33, seq_kv=47, layouts=cases.all_layouts(layout), causal="bottom_right")
    inputs = make_inputs(case)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)

    def memory() -> list[Tensor]:
        return [torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).view(torch.int16).clone() for x in tensors]

    before = memory()
    oracle.run(inputs, jitattn.attention, causal=case.causal)
    for now, then in zip(memory(), before, strict=True):
        assert torch.equal(now, then)


def test_rows_without_keys() -> None:
    inputs = make_inputs(Case(seq_q=100, seq_kv=30))
    out, lse = jitattn.attention(inputs.q, inputs.k, inputs.v, causal="bottom_right", return_lse=True)
    assert (out[:, :, :70] == 0).all() and (lse[:, :, :70] == -math.inf).all()
    assert out.isfinite().all() and lse[:, :, 70:].isfinite().all()


def test_views_that_negate_lazily() -> None:
    """torch keeps the sign of such a view as a bit beside the memory."""
    x = torch.randn(1, 2, 8, 16, dtype=torch.complex64)
    q, k, v = x.conj().imag, (2 * x).conj().imag, (x + 1j).conj().imag
    assert q.is_neg()
    expected = jitattn.attention(q.clone(), k.clone(), v.clone())
    assert torch.equal(jitattn.attention(q, k, v), expected)


def test_offsets_beyond_two_to_the_31_elements() -> None:
    stride = 2**31 + 17
    try:
        memory = torch.empty(stride + 4 * 8 * 16, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("4 GiB of address space are not to be had")
    far = memory.as_strided((2, 2, 8, 16), (stride, 128, 16, 1))
    near = torch.randn(2, 2, 8, 16).half()
    far.copy_(near)
    expected = jitattn.attention(near, near, near)
    assert torch.equal(jitattn.attention(far, far, far), expected)


# Values that are not finite. The shapes cross tile edges, and the key in question sits in the middle.


def _with_and_without(case: Case, spoil: Callable[[cases.Inputs], object]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    clean, spoiled = make_inputs(case), make_inputs(case)
    spoil(spoiled)
    good, good_lse = jitattn.attention(clean.q, clean.k, clean.v, causal=case.causal, return_lse=True)
    bad, bad_lse = jitattn.attention(spoiled.q, spoiled.k, spoiled.v, causal=case.causal, return_lse=True)
    return good, good_lse, bad, bad_lse


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_bad_query_spoils_its_own_row_only(value: float, dtype: torch.dtype) -> None:
    case = Case(dtype, seq_q=75, seq_kv=141)
    good, good_lse, bad, bad_lse = _with_and_without(case, lambda x: x.q[0, 1, 37, :2].fill_(value))
    assert bad[0, 1, 37].isnan().all() and bad_lse[0, 1, 37].isnan()
    good[0, 1, 37], good_lse[0, 1, 37] = math.nan, math.nan
    torch.testing.assert_close(bad, good, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(bad_lse, good_lse, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("key", [0, 70, 140])
def test_a_nan_key_spoils_the_rows_that_see_it_only(dtype: torch.dtype, key: int) -> None:
    case = Case(dtype, seq_q=141, seq_kv=141, causal="top_left")
    good, good_lse, bad, bad_lse = _with_and_without(case, lambda x: x.k[0, 0, key, 5].fill_(math.nan))
    assert bad[0, 0, key:].isnan().all() and bad_lse[0, 0, key:].isnan().all()
    assert torch.equal(bad[0, 0, :key], good[0, 0, :key]) and torch.equal(bad[0, 1], good[0, 1])
    assert torch.equal(bad_lse[0, 0, :key], good_lse[0, 0, :key])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_value_spoils_its_column_only(value: float) -> None:
    case = Case(seq_q=141, seq_kv=141, causal="top_left")
    good, good_lse, bad, bad_lse = _with_and_without(case, lambda x: x.v[0, 0, 70, 5].fill_(value))
    expected = torch.full_like(bad[0, 0, 70:, 5], value)
    torch.testing.assert_close(bad[0, 0, 70:, 5], expected, equal_nan=True)
    # Rows that may not see the key are 0 * value there in eager PyTorch; in a fused kernel it depends on the tile.
    bad[0, 0, :, 5] = good[0, 0, :, 5] = 0
    assert torch.equal(bad, good) and torch.equal(bad_lse, good_lse)


@pytest.mark.parametrize("scale", [0.125, -0.125])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_nan_scale_spoils_all_and_an_infinite_query_its_row(dtype: torch.dtype, scale: float) -> None:
    inputs = make_inputs(Case(dtype, seq_q=20, seq_kv=30))
    assert jitattn.attention(inputs.q, inputs.k, inputs.v, scale=math.nan).isnan().all()
    good = jitattn.attention(inputs.q, inputs.k, inputs.v, scale=scale)
    inputs.q[0, 0, 3, 5] = math.inf  # against keys of both signs: scores of inf and -inf
    bad = jitattn.attention(inputs.q, inputs.k, inputs.v, scale=scale)
    assert bad[0, 0, 3].isnan().all()
    bad[0, 0, 3] = good[0, 0, 3]
    assert torch.equal(bad, good)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_scores_that_rise_or_fall_a_little_with_every_tile(dtype: torch.dtype, direction: int) -> None:
    """So little that earlier sums stay as they are for some tiles, and so often that they could overflow."""
    inputs = make_inputs(Case(dtype, heads_q=1, heads_kv=1, seq_q=70, seq_kv=3000))
    inputs.q[..., 0], inputs.k[..., 0] = 16, torch.linspace(-32 * direction, 32 * direction, 3000)
    expected = oracle.expect(inputs, oracle.Problem(0.125, None))
    oracle.check_all(oracle.run(inputs, jitattn.attention), expected)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_keys_of_minus_infinity_are_as_if_absent(dtype: torch.dtype) -> None:
    """Whole tiles of scores of -inf come first, and then some: the row's maximum is -inf for a while."""
    inputs = make_inputs(Case(dtype, seq_q=40, seq_kv=300))
    inputs.q[..., 0].abs_().add_(0.1)
    inputs.k[:, :, :200, 0] = -math.inf
    inputs.k[:, :, 250, 0] = -math.inf
    kept = [n for n in range(200, 300) if n != 250]
    out, lse = jitattn.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    without = replace(inputs, k=inputs.k[:, :, kept], v=inputs.v[:, :, kept])
    expected = oracle.expect(without, oracle.Problem(0.125, None), backward=False)
    oracle.check_all({"out": out, "lse": lse}, expected, ("out", "lse"))


# Other instruction sets, in a process of their own since a process has one.


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="an x86 instruction set")
@pytest.mark.parametrize("isa", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_other_instruction_sets(isa: str, run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_HOST_ISA", isa)
    try:
        target.host()
    except JitattnError as error:
        pytest.skip(str(error))
    script = (
        "import jitattn\n"
        "from jitattn import target\n"
        "from tests import cases, oracle\n"
        "for case in cases.SMOKE[:5]: oracle.verify(case, jitattn.attention)\n"
        "print(target.host())\n"
    )
    assert f"host:{isa}\n" in run_python(script, JITATTN_HOST_ISA=isa)
