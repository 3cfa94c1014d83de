"""Forward on the host backend: numbers, memory, threads, errors."""

from __future__ import annotations

import gc
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import target
from jitattn.errors import JitattnError, Unsupported
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


@pytest.mark.parametrize("value", [math.nan, math.inf])
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


# Threads.


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("case", cases.SMOKE[:3], ids=str)
def test_any_number_of_torch_threads(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    oracle.verify(case, jitattn.attention)


def test_one_torch_thread_uses_one_core() -> None:
    x = torch.randn(1, 8, 1024, 64)
    torch.set_num_threads(1)
    jitattn.attention(x, x, x)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        jitattn.attention(x, x, x)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert cpu < 1.3 * wall + 0.02


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("shape", [(1, 8, 1024, 64), (1, 1, 4096, 64)], ids=str)
def test_two_torch_threads_share_the_work(shape: tuple[int, ...]) -> None:
    """One head alone keeps both busy too. Counted in processor time, so that other work does not matter."""
    x = torch.randn(shape)
    torch.set_num_threads(2)
    jitattn.attention(x, x, x)

    def elsewhere() -> float:
        here, everywhere = time.thread_time(), time.process_time()
        for _ in range(3):
            jitattn.attention(x, x, x)
        return 1 - (time.thread_time() - here) / (time.process_time() - everywhere)

    assert max(elsewhere() for _ in range(5)) > 0.25


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... at the same moment; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_python_threads_at_once() -> None:
    work = cases.SMOKE + cases.SHAPES[3:9]
    prepared = [make_inputs(case) for case in work]
    expected = [jitattn.attention(x.q, x.k, x.v, causal=c.causal) for c, x in zip(work, prepared, strict=True)]

    def call(index: int) -> None:
        for turn in range(4 * len(work)):
            which = (index * 5 + turn) % len(work)
            x = prepared[which]
            out = jitattn.attention(x.q, x.k, x.v, causal=work[which].causal)
            assert torch.equal(out, expected[which]), str(work[which])

    _in_threads(6, call)


def test_threads_that_need_the_same_new_kernel_compile_it_once() -> None:
    def made() -> int:  # or read, where an earlier run has left it in the cache
        return jitattn.stats()["compiled"] + jitattn.stats()["disk_hits"]

    x = torch.randn(1, 2, 50, 23)
    before = made()
    outs: list[Tensor] = []
    _in_threads(6, lambda _: outs.append(jitattn.attention(x, x, x)))
    assert made() == before + 1
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_too(run_python: Callable[..., str]) -> None:
    """Data-loader workers are forked; the parent's threads and locks do not exist in them.

    torch's own parallel operations would hang in such a child, so it compares bytes, and gives up by itself.
    """
    script = (
        "import math, os, signal, torch, jitattn\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(1, 4, 300, 64)\n"
        "out = jitattn.attention(x, x, x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(60)\n"
        "    again = jitattn.attention(x, x, x)\n"
        "    new = jitattn.attention(x, x, x, causal=True)\n"
        "    same = again.numpy().tobytes() == out.numpy().tobytes()\n"
        "    os._exit(0 if same and math.isfinite(new[0, 3, 299, 63]) else 3)\n"
        "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert "child ended with 0" in run_python(script)


def test_calls_do_not_keep_memory() -> None:
    x = torch.randn(1, 2, 64, 64)
    resource = pytest.importorskip("resource")
    for _ in range(200):
        jitattn.attention(x, x, x)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2000):
        jitattn.attention(x, x, x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "kilobytes"


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


# Errors: every one is raised before anything is compiled, and says what to do instead.


def _qkv(seq_q: int = 8, seq_kv: int = 8, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, 4, n, 16, **options) for n in (seq_q, seq_kv, seq_kv))  # type: ignore[return-value]


def test_causal_true_is_refused_when_lengths_differ() -> None:
    with pytest.raises(MISUSE, match="(?s)top_left.*bottom_right|bottom_right.*top_left"):
        jitattn.attention(*_qkv(8, 12), causal=True)


@pytest.mark.parametrize("causal", ["diagonal", "TOP_LEFT", 2, "none?"])
def test_an_unknown_causal_is_refused(causal: Any) -> None:
    with pytest.raises(MISUSE, match="causal"):
        jitattn.attention(*_qkv(), causal=causal)


def test_float64_names_what_takes_it() -> None:
    with pytest.raises(Unsupported, match="(?s)float64.*(float32|reference)"):
        jitattn.attention(*_qkv(dtype=torch.float64))
    out = jitattn.attention(*_qkv(dtype=torch.float64), backend="reference")
    assert out.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 2, 4, 8, dtype=dtype)
    for backend in (None, "reference"):
        with pytest.raises(MISUSE, match=str(dtype).removeprefix("torch.")):
            jitattn.attention(x, x, x, backend=backend)


def _shape(*sizes: int, **options: Any) -> Tensor:
    return torch.zeros(*sizes, **options)


BAD_CALLS = {
    "batch of k": (_shape(2, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16)),
    "batch of v": (_shape(2, 4, 8, 16), _shape(2, 4, 8, 16), _shape(1, 4, 8, 16)),
    "head dim of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 32), _shape(1, 4, 8, 16)),
    "heads not a multiple": (_shape(1, 4, 8, 16), _shape(1, 3, 8, 16), _shape(1, 3, 8, 16)),
    "more key heads": (_shape(1, 2, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16)),
    "heads of v": (_shape(1, 4, 8, 16), _shape(1, 2, 8, 16), _shape(1, 4, 8, 16)),
    "no key heads": (_shape(1, 4, 8, 16), _shape(1, 0, 8, 16), _shape(1, 0, 8, 16)),
    "length of v": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 9, 16)),
    "three dimensions": (_shape(4, 8, 16), _shape(4, 8, 16), _shape(4, 8, 16)),
    "five dimensions": (_shape(1, 1, 4, 8, 16), _shape(1, 1, 4, 8, 16), _shape(1, 1, 4, 8, 16)),
    "dtype of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16).half(), _shape(1, 4, 8, 16)),
    "dtype of v": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16).bfloat16()),
    "device of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16, device="meta"), _shape(1, 4, 8, 16)),
    "no head dim": (_shape(1, 4, 8, 0), _shape(1, 4, 8, 0), _shape(1, 4, 8, 16)),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("call", BAD_CALLS)
def test_tensors_that_do_not_fit_are_refused(call: str, backend: str | None) -> None:
    q, k, v = BAD_CALLS[call]
    with pytest.raises(MISUSE):
        jitattn.attention(q, k, v, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cuda", "hip", "cpu", "tpu"])
def test_backends_that_cannot_take_these_tensors_are_refused(backend: str) -> None:
    with pytest.raises(MISUSE, match=backend):
        jitattn.attention(*_qkv(), backend=backend)


LATER = {
    "window": 4,
    "softcap": 30.0,
    "alibi_slopes": torch.ones(4),
    "bias": torch.zeros(8, 8),
    "mask": torch.ones(8, 8, dtype=torch.bool),
    "sink": torch.zeros(4),
    "score_mod": lambda score, b, h, m, n: score,
    "block_mask": lambda b, h, m, n: m >= n,
    "dropout_p": 0.1,
}


@pytest.mark.parametrize("backend", [None, "host", "reference"])
@pytest.mark.parametrize("option", LATER)
def test_an_option_is_obeyed_or_refused(option: str, backend: str | None) -> None:
    with pytest.raises(Unsupported, match=option):
        jitattn.attention(*_qkv(), backend=backend, **{option: LATER[option]})


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_defaults_of_every_option_may_be_written_out(backend: str | None) -> None:
    q, k, v = _qkv()
    spelled: dict[str, Any] = dict.fromkeys(LATER) | {"softcap": 0.0, "dropout_p": 0.0, "deterministic": True}
    expected = jitattn.attention(q, k, v, backend=backend)
    assert torch.equal(jitattn.attention(q, k, v, backend=backend, scale=0.25, **spelled), expected)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        jitattn.attention(*_qkv(), is_causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        jitattn.attention(*_qkv(), None)  # type: ignore[misc]


@pytest.mark.parametrize("scale", ["1", None, 1, torch.tensor(0.5)], ids=str)
def test_scale_may_be_what_float_takes_or_is_refused(scale: Any) -> None:
    q, k, v = _qkv()
    try:
        out = jitattn.attention(q, k, v, scale=scale)
    except MISUSE:
        assert isinstance(scale, (str, Tensor))
        return
    expected = jitattn.attention(q, k, v, scale=0.25 if scale is None else float(scale))
    assert torch.equal(out, expected)


def test_reference_backend_obeys_the_rule() -> None:
    for case in cases.SMOKE:
        oracle.verify(replace(case), jitattn.attention, backend="reference")
