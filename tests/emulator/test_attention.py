"""The CUDA kernels as they are, on the emulator: right, without races, and broken wherever something is taken out."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from jitattn import target
from jitattn.config import KernelConfig
from tests import emulator, oracle
from tests.cases import Case, all_layouts
from tests.emulator import EmulatorError, attention
from tests.emulator.attention import Emulated

pytestmark = emulator.ONLY_HERE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Case, architecture and more of Emulated's options.
CALLS: tuple[tuple[Case, str, dict[str, Any]], ...] = (
    (Case(BF16, heads_q=4, heads_kv=2, causal="bottom_right"), "sm_80", {}),
    (Case(F16, head_dim=40, head_dim_v=72, causal="top_left"), "sm_80", {}),
    (Case(F32, seq_q=50, seq_kv=51, head_dim=17, head_dim_v=17), "sm_80", {}),
    (Case(F32, causal="bottom_right", scale=-0.2), "sm_80", {}),
    (Case(BF16, layouts=all_layouts("odd"), head_dim=24, head_dim_v=24), "sm_80", {}),
    (Case(BF16, layouts=all_layouts("bhds"), head_dim=24, head_dim_v=24), "sm_80", {}),
    (Case(BF16, causal="top_left"), "sm_80", {"deterministic": True}),
    (Case(BF16, heads_q=1, heads_kv=1, seq_q=20, seq_kv=700, causal="bottom_right"), "sm_80", {"units": 64}),
    (Case(F32, causal="top_left"), "sm_90", {}),
    (Case(F32, heads_q=1, heads_kv=1, seq_q=20, seq_kv=700, head_dim=48), "sm_80", {"units": 64}),
    (Case(F32, heads_q=4, heads_kv=2, causal="top_left"), "sm_80", {"deterministic": True}),
    (Case(BF16, head_dim=128, head_dim_v=128, causal="top_left"), "sm_90", {}),
    (Case(BF16, heads_q=1, heads_kv=1, seq_q=150, head_dim=136, head_dim_v=200, causal="bottom_right"), "sm_90", {}),
    (Case(BF16, causal="top_left"), "sm_120a", {}),
    (Case(F16, causal="top_left"), "sm_75", {}),
    (Case(F32, causal="top_left"), "sm_75", {}),
    (Case(F16, causal="top_left"), "sm_70", {}),
)


def name_of(part: Any) -> str:
    return "-".join(part) if isinstance(part, dict) else str(part)


@pytest.mark.parametrize(("case", "arch", "options"), CALLS, ids=name_of)
def test_results(case: Case, arch: str, options: dict[str, Any]) -> None:
    oracle.verify(case, Emulated(arch, race_check=True, seed=len(str(case)), **options))


def test_plans_are_run_whole() -> None:
    def kernels(**options: Any) -> list[str]:
        emulated = Emulated(**options)
        oracle.run(oracle.make_inputs(Case(BF16, heads_q=1, heads_kv=1, seq_q=20, seq_kv=700)), emulated)
        return [config.kernel for config in emulated.ran]

    assert kernels(units=1) == ["forward", "delta", "backward", "store_grad_query"]
    assert kernels(units=64) == ["forward", "combine", "delta", "backward", "store_grad_query"]
    assert kernels(units=1, deterministic=True) == ["forward", "delta", "backward", "grad_query"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_powers_of_two_pass_through_float32(deterministic: bool) -> None:
    """However large or small the elements of a head are as a whole, their products keep every bit."""
    case = Case(F32, heads_q=4, heads_kv=2, causal="top_left")
    inputs = oracle.make_inputs(case)
    emulated = Emulated("sm_80", deterministic=deterministic)
    plain = oracle.run(inputs, emulated, causal=case.causal)
    up, down = 2.0**60, 2.0**-60
    scaled = dataclasses.replace(
        inputs, q=inputs.q * up, k=inputs.k * down, v=inputs.v * down, dout=inputs.dout * up, dlse=inputs.dlse
    )
    got = oracle.run(scaled, emulated, causal=case.causal)
    for name, factor in (("out", down), ("lse", 1.0), ("dq", down), ("dk", up), ("dv", up)):
        assert torch.equal(got[name], plain[name] * factor), name


@pytest.mark.parametrize(("dtype", "size"), oracle.COARSE_GPU[-3:], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_scores_whose_rounding_is_coarse(dtype: torch.dtype, size: float, deterministic: bool) -> None:
    oracle.verify_coarse(dtype, size, Emulated("sm_80", deterministic=deterministic))


@pytest.mark.parametrize("across", [2, 4])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_warps_may_share_rows(dtype: torch.dtype, across: int) -> None:
    def share(config: KernelConfig) -> KernelConfig:
        if config.kernel != "forward":
            return config
        tile = {"warps": 2 * across, "across": across, "pad": 16 * across, "stages": 1}
        return dataclasses.replace(
            config, block_m=64, block_n=64, constants=tuple((dict(config.constants) | tile).items())
        )

    case = Case(dtype, heads_kv=1, head_dim=80, head_dim_v=48, causal="bottom_right", scale=-0.3)
    oracle.verify(case, Emulated("sm_90", race_check=True, change=share))


def test_every_seed_gives_the_same_bits() -> None:
    """Sums of dQ have an order of their own only in deterministic plans."""
    case = Case(BF16, seq_q=150, causal="bottom_right")
    results = [oracle.run(oracle.make_inputs(case), Emulated(seed=seed, deterministic=True)) for seed in range(4)]
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in oracle.NAMES)


def one_stage(config: KernelConfig) -> KernelConfig:
    """The same kernel with as many barriers as it may have."""
    constants = tuple((name, 1 if name == "stages" else value) for name, value in config.constants)
    return dataclasses.replace(config, constants=constants)


# Kernel, what of its text is replaced where it is found first (an expression, not to age too fast), and by what.
FAULTS = {
    "copies are not waited for": ("forward", r"ptx::copies_wait<pending>\(\);", ""),
    "copies of the backward pass are not waited for": ("backward", r"ptx::copies_wait<pending>\(\);", ""),
    "nobody waits for the others' copies": ("backward", r"(prepare\(\);\s+)ptx::sync_block\(\);", r"\1"),
    "a barrier is left out": ("backward", r"(?s)(struct Backward .*?)ptx::sync_block\(\);", r"\1"),
    "a warp skips a barrier": ("grad_query", r"(?s)(struct GradQuery .*?)(ptx::sync_b)", r"\1if (arch::warp()) \2"),
    "rows lie closer than they are read": ("forward", r"\* pitch (\+ column / 8 \* e\w+;)", r"* (pitch - 16) \1"),
    "rows are read unaligned": ("forward", r"\* pitch (\+ column / 8 \* e\w+;)", r"* (pitch + 2) \1"),
    "rows beyond the last are read": ("forward", r"whole \|\| row < count \? inside : 0", "inside"),
    "rows beyond the last are stored": ("backward", r"if \(row >= count\) return;", ""),
    "sums go elsewhere": ("backward", r"float\* at = to \+ ", "float* at = to + 1 + "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new = FAULTS[fault]

    def assemble(config: KernelConfig, on: target.Target) -> str:
        text = emulator.assemble(config, on)
        if config.kernel != kernel:
            return text
        text, count = re.subn(old, new, text, count=1)
        planted.append(count)
        return text

    planted: list[int] = []
    monkeypatch.setattr(attention, "assemble", assemble)
    case = Case(BF16, heads_q=1, heads_kv=1, seq_q=140, seq_kv=150, causal="top_left")
    emulated = Emulated("sm_80", race_check=True, deterministic=kernel == "grad_query", change=one_stage)
    with pytest.raises((EmulatorError, AssertionError)):
        oracle.verify(case, emulated)
    assert planted == [1], f"{kernel} has nothing like {old!r} any more: plant another fault"
