"""Numbers on a GPU: the same cases and the same rule as on the host, in both ways to compute gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import target
from jitattn.errors import Unsupported
from tests import cases, gpu, oracle
from tests.cases import CAUSAL, DTYPES, Case, Causal, Inputs, make_inputs

pytestmark = gpu.MARKS
DEVICE = "cuda"
GRADS = ("dq", "dk", "dv")
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])


@BOTH
@pytest.mark.parametrize("case", [case for case in cases.ALL if gpu.fits(case)], ids=str)
def test_case(case: Case, deterministic: bool) -> None:
    oracle.verify(case, jitattn.attention, device=DEVICE, deterministic=deterministic)


@pytest.mark.parametrize("case", [case for case in cases.ALL if not gpu.fits(case)], ids=str)
def test_head_dims_that_have_no_kernel_are_refused(case: Case) -> None:
    inputs = make_inputs(case, DEVICE)
    with pytest.raises(Unsupported, match="up to 256"):
        jitattn.attention(inputs.q, inputs.k, inputs.v, causal=case.causal)


# Every length around the tiles: queries and keys take different ones, and every residue comes with each dtype.
def _residues() -> list[Case]:
    shape = Case(heads_q=2, heads_kv=1)
    found = []
    for n in range(1, 200):
        other, dtype, causal = (n * 37) % 199 + 1, DTYPES[n % 3], CAUSAL[n // 3 % 3]
        found.append(replace(shape, dtype=dtype, seq_q=n, seq_kv=other, causal=causal, fill="edges"))
        found.append(replace(shape, dtype=DTYPES[(n + 1) % 3], seq_q=other, seq_kv=n, causal=CAUSAL[(n + 1) % 3]))
    for n in range(440, 580):
        dtype = DTYPES[n % 3]
        found.append(replace(shape, dtype=dtype, seq_q=n, seq_kv=n, head_dim=128, head_dim_v=128, causal="top_left"))
    return found


@pytest.mark.parametrize("case", _residues(), ids=str)
def test_every_length(case: Case) -> None:
    oracle.verify(case, jitattn.attention, device=DEVICE, deterministic=False)


# Few rows and many keys: the keys are split among blocks, and the parts combined.
_KINDS: tuple[tuple[Causal, str], ...] = ((False, "edges"), ("bottom_right", "ramp_up"), ("top_left", "normal"))
SPLIT = [
    Case(dtype, batch=batch, heads_q=heads_q, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, causal=causal, fill=fill,
         head_dim=head_dim, head_dim_v=head_dim_v)
    for dtype in DTYPES
    for batch, heads_q, seq_q, seq_kv, head_dim, head_dim_v in (
        (1, 2, 1, 5000, 64, 64), (2, 4, 7, 3001, 128, 128), (1, 1, 64, 2048, 96, 40), (1, 3, 130, 4097, 33, 256),
    )
    for causal, fill in _KINDS
]  # fmt: skip


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_keys(case: Case) -> None:
    inputs = make_inputs(case, DEVICE)
    found = jitattn.explain(inputs.q, inputs.k, inputs.v, causal=case.causal)
    assert found.ready.plan.splits > 1
    assert [kernel.config.kernel for kernel in found.kernels][-2:] == ["forward", "combine"]
    oracle.verify(case, jitattn.attention, device=DEVICE, deterministic=False)


LARGE = [
    Case(torch.bfloat16, batch=2, heads_q=16, heads_kv=16, seq_q=2048, seq_kv=2048, head_dim=128, head_dim_v=128),
    Case(torch.float16, batch=4, heads_q=32, heads_kv=8, seq_q=1024, seq_kv=1024, causal="bottom_right"),
    Case(torch.bfloat16, batch=2, heads_q=8, heads_kv=8, seq_q=1500, seq_kv=1700, head_dim=256, head_dim_v=256,
         causal="bottom_right"),
    Case(torch.float32, batch=2, heads_q=16, heads_kv=16, seq_q=1024, seq_kv=1024, causal="top_left"),
    Case(torch.float16, batch=16, heads_q=16, heads_kv=16, seq_q=784, seq_kv=784, head_dim=128, head_dim_v=128),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case: Case, deterministic: bool) -> None:
    """Enough to fill the card, so that other tiles are chosen than for the small cases."""
    oracle.verify(case, jitattn.attention, device=DEVICE, deterministic=deterministic)


@pytest.mark.parametrize("case", cases.SMOKE, ids=str)
@pytest.mark.parametrize("used", ["out", "lse"])
def test_only_one_result_has_a_gradient(case: Case, used: str) -> None:
    inputs = make_inputs(case, DEVICE)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = jitattn.attention(q, k, v, return_lse=True, scale=case.scale, causal=case.causal)
    results, cotangents = ((out,), (inputs.dout,)) if used == "out" else ((lse,), (inputs.dlse,))
    grads = torch.autograd.grad(results, (q, k, v), cotangents, materialize_grads=True)
    dout = torch.zeros_like(inputs.dout) if used == "lse" else inputs.dout
    dlse = inputs.dlse if used == "lse" else torch.zeros_like(inputs.dlse)
    expected = oracle.expect(replace(inputs, dout=dout, dlse=dlse), oracle.Problem(case.softmax_scale, case.diagonal))
    oracle.check_all(dict(zip(GRADS, grads, strict=True)), expected, GRADS)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_backward(dtype: torch.dtype, deterministic: bool) -> None:
    """The gradient of a sum is one element with stride 0 everywhere."""
    inputs = make_inputs(Case(dtype, seq_q=50, seq_kv=70), DEVICE)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    jitattn.attention(q, k, v, deterministic=deterministic).sum().backward()
    ones = replace(inputs, dout=torch.ones_like(inputs.dout), dlse=torch.zeros_like(inputs.dlse))
    expected = oracle.expect(ones, oracle.Problem(0.125, None))
    oracle.check_all({"dq": q.grad, "dk": k.grad, "dv": v.grad}, expected, GRADS)  # type: ignore[dict-item]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_alignment_gives_the_same(dtype: torch.dtype, offset: int) -> None:
    """However wide the loads, the products are the same; only delta is summed in another order.

    Where tensors would move as boxes but for their alignment, other kernels run: those are held to the oracle.
    """
    case = Case(dtype, seq_q=100, seq_kv=130, causal="bottom_right")
    inputs = make_inputs(case, DEVICE)

    def moved(x: Tensor) -> Tensor:
        memory = torch.full((x.numel() + offset + 8,), math.nan, dtype=dtype, device=DEVICE)
        return memory[offset : offset + x.numel()].view(x.shape).copy_(x)

    there = Inputs(moved(inputs.q), moved(inputs.k), moved(inputs.v), moved(inputs.dout), inputs.dlse)
    got = gpu.run(there, causal="bottom_right", deterministic=True)
    if forward_kernels(there) != forward_kernels(inputs):
        oracle.check_all(got, oracle.expect(inputs, oracle.Problem(case.softmax_scale, case.diagonal)), got)
        return
    expected = gpu.run(inputs, causal="bottom_right", deterministic=True)
    for name in ("out", "lse"):
        assert torch.equal(got[name], expected[name]), name
    for name in GRADS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3 if dtype.itemsize == 2 else 1e-5)


def forward_kernels(inputs: Inputs) -> list[str]:
    explained = jitattn.explain(inputs.q, inputs.k, inputs.v, causal="bottom_right", direction="forward")
    return [kernel.config.kernel for kernel in explained.kernels]


@pytest.mark.parametrize("layout", cases.LAYOUTS + cases.EXPANDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_contiguous_in_the_inputs_dtype(layout: str, dtype: torch.dtype) -> None:
    case = Case(dtype, batch=2, heads_q=4, seq_q=9, seq_kv=12, head_dim_v=64, layouts=cases.all_layouts(layout))
    inputs = make_inputs(case, DEVICE)
    out, lse = jitattn.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert out.shape == (2, 4, 9, 64) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 9) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert out.device == lse.device == inputs.q.device
    assert torch.equal(out, jitattn.attention(inputs.q, inputs.k, inputs.v, backend="cuda")), "not reproducible"


@pytest.mark.parametrize("layout", ["bhsd", "padded", "strided", "packed"])
def test_inputs_and_the_memory_around_them_are_left_alone(layout: str) -> None:
    case = Case(torch.bfloat16, seq_q=33, seq_kv=47, layouts=cases.all_layouts(layout), causal="bottom_right")
    inputs = make_inputs(case, DEVICE)

    def memory() -> list[Tensor]:
        tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
        return [torch.empty(0, dtype=x.dtype, device=DEVICE).set_(x.untyped_storage()).view(torch.int16).clone()
                for x in tensors]  # fmt: skip

    before = memory()
    gpu.run(inputs, causal=case.causal)
    for now, then in zip(memory(), before, strict=True):
        assert torch.equal(now, then)


# Values that are not finite.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("key", [0, 70, 140])
def test_a_nan_key_spoils_the_rows_that_see_it_only(dtype: torch.dtype, key: int) -> None:
    inputs = make_inputs(Case(dtype, seq_q=141, seq_kv=141), DEVICE)
    good, good_lse = jitattn.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    inputs.k[0, 0, key, 5] = math.nan
    bad, bad_lse = jitattn.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    assert bad[0, 0, key:].isnan().all() and bad_lse[0, 0, key:].isnan().all()
    assert torch.equal(bad[0, 0, :key], good[0, 0, :key]) and torch.equal(bad[0, 1], good[0, 1])
    assert torch.equal(bad_lse[0, 0, :key], good_lse[0, 0, :key])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_query_spoils_its_own_row_only(value: float, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype, seq_q=75, seq_kv=141), DEVICE)
    good = jitattn.attention(inputs.q, inputs.k, inputs.v)
    inputs.q[0, 1, 37, :2] = value
    bad = jitattn.attention(inputs.q, inputs.k, inputs.v)
    assert bad[0, 1, 37].isnan().all()
    good[0, 1, 37] = math.nan
    torch.testing.assert_close(bad, good, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_of_minus_infinity_are_as_if_absent(dtype: torch.dtype) -> None:
    """Whole tiles of scores of -inf come first, and then some: the row's maximum is -inf for a while.

    Not in float32: the two parts of a float whose products stand in for its own may differ in sign, and infinity times
    both is NaN (arch/cuda/halves.h)."""
    inputs = make_inputs(Case(dtype, seq_q=40, seq_kv=300), DEVICE)
    inputs.q[..., 0].abs_().add_(0.1)
    inputs.k[:, :, :200, 0] = -math.inf
    inputs.k[:, :, 250, 0] = -math.inf
    kept = [n for n in range(200, 300) if n != 250]
    out, lse = jitattn.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    without = replace(inputs, k=inputs.k[:, :, kept], v=inputs.v[:, :, kept])
    expected = oracle.expect(without, oracle.Problem(0.125, None), backward=False)
    oracle.check_all({"out": out, "lse": lse}, expected, ("out", "lse"))


@BOTH
@pytest.mark.parametrize(("dtype", "size"), oracle.COARSE_GPU, ids=str)
def test_scores_whose_rounding_is_coarse(dtype: torch.dtype, size: float, deterministic: bool) -> None:
    oracle.verify_coarse(dtype, size, functools.partial(jitattn.attention, deterministic=deterministic), DEVICE)


# Bits.


# On Hopper: sums in the order of the keys, at head dims with kernels of their own; all keys at hand (the last two).
@pytest.mark.parametrize(
    ("head_dim", "seq_q", "seq_kv", "causal"),
    [
        (40, 700, 900, "bottom_right"),
        (64, 1500, 1500, "top_left"),
        (128, 900, 1500, False),
        (128, 1500, 1500, "top_left"),
        (256, 900, 900, "top_left"),
        (256, 300, 700, False),
        (128, 300, 250, False),
        (256, 300, 120, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_gradients_are_bitwise_equal(
    dtype: torch.dtype, head_dim: int, seq_q: int, seq_kv: int, causal: Any
) -> None:
    case = Case(
        dtype,
        batch=2,
        heads_q=24,
        heads_kv=6,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=head_dim,
        head_dim_v=head_dim,
        causal=causal,
    )
    inputs = make_inputs(case, DEVICE)
    options: dict[str, Any] = {"causal": causal, "deterministic": True}
    first = gpu.run(inputs, **options)
    for _ in range(10):
        again = gpu.run(inputs, **options)
        for name in oracle.NAMES:
            assert torch.equal(first[name], again[name]), name


def test_torchs_own_switch_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case(torch.float16, seq_q=40, seq_kv=700), DEVICE)

    def steps(**options: Any) -> list[Any]:
        found = jitattn.explain(inputs.q, inputs.k, inputs.v, direction="backward", **options)
        return [kernel.config for kernel in found.kernels]

    default, deterministic = steps(), steps(deterministic=True)
    assert default != deterministic
    torch.use_deterministic_algorithms(True)
    assert steps() == deterministic and steps(deterministic=False) == default


# Older families on a newer GPU, in a process of their own since a process has one architecture.


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_older_architectures(arch: str, run_python: Callable[..., str]) -> None:
    capability = torch.cuda.get_device_capability()
    if target.CUDA_ARCHS[arch].capability > capability:
        pytest.skip(f"this GPU is older than {arch}")
    script = (
        "import torch, jitattn\n"
        "from jitattn import launch\n"
        "from tests import cases, gpu, oracle\n"
        "on = launch.target_of(torch.device('cuda'))\n"
        "some = cases.SMOKE + cases.SHAPES[::7] + cases.LAYOUT_CASES[::5] + cases.HEAD_DIMS[::6]\n"
        "for case in filter(gpu.fits, some):\n"
        "    if case.dtype == torch.float32 and max(case.head_dim, case.head_dim_v) > 240 and '75' in on.arch:\n"
        "        continue  # its backward pass finds no room in 64 KiB\n"
        "    if case.dtype != torch.bfloat16 or on.bf16_dot:\n"
        "        for deterministic in (False, True):\n"
        "            oracle.verify(case, jitattn.attention, device='cuda', deterministic=deterministic)\n"
        "print(on)\n"
    )
    assert arch.removeprefix("sm_") in run_python(script, JITATTN_CUDA_ARCH=arch)
