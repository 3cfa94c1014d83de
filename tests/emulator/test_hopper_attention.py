"""Hopper's own kernels on the emulator: right, without races, and broken wherever something is taken out."""

from __future__ import annotations

import re

import pytest
import torch

from jitattn import target
from jitattn.config import KernelConfig
from tests import emulator, oracle
from tests.cases import Case
from tests.emulator import EmulatorError, attention
from tests.emulator.attention import Emulated

pytestmark = emulator.ONLY_HERE

BF16, F16 = torch.bfloat16, torch.float16

# Case and multiprocessors: with few of them, blocks of the forward kernel do several pieces of work.
CALLS = (
    (Case(BF16, seq_q=300, seq_kv=400, head_dim=64, head_dim_v=64, causal="top_left"), 3),
    (Case(BF16, heads_q=4, heads_kv=2, seq_q=70, seq_kv=300, head_dim=64, head_dim_v=64, causal="bottom_right"), 132),
    (Case(F16, heads_q=4, heads_kv=2, head_dim=128, head_dim_v=80, causal="bottom_right"), 2),
    (Case(BF16, seq_q=200, seq_kv=330, head_dim=256, head_dim_v=256), 1),
    (Case(F16, seq_q=260, seq_kv=100, head_dim=112, head_dim_v=80, causal="bottom_right", scale=0.3), 2),
    (Case(BF16, heads_q=2, heads_kv=1, seq_q=150, seq_kv=200, head_dim=192, head_dim_v=128, causal="top_left"), 3),
    (Case(F16, seq_q=65, seq_kv=130, head_dim=160, head_dim_v=160, causal="bottom_right"), 3),
    (Case(BF16, batch=2, seq_q=1, seq_kv=513, head_dim=96, head_dim_v=96), 5),
    (Case(BF16, heads_q=4, heads_kv=2, seq_q=140, seq_kv=250, head_dim=104, head_dim_v=128, causal="bottom_right"), 3),
    (Case(F16, batch=2, seq_q=70, seq_kv=129, head_dim=128, head_dim_v=72), 132),
    (Case(BF16, seq_q=130, seq_kv=120, head_dim=256, head_dim_v=136, causal="bottom_right"), 2),
    (Case(F16, heads_q=2, heads_kv=1, seq_q=90, seq_kv=100, head_dim=48, head_dim_v=64, causal="bottom_right"), 2),
)


@pytest.mark.parametrize(("case", "units"), CALLS, ids=str)
def test_results(case: Case, units: int) -> None:
    emulated = Emulated("sm_90a", race_check=True, seed=len(str(case)), units=units)
    oracle.verify(case, emulated)
    assert emulated.ran[0].kernel == "forward_warpgroups"


ORDERED_CALLS = (
    Case(BF16, heads_q=2, heads_kv=1, seq_q=200, seq_kv=400, head_dim=64, head_dim_v=64, causal="bottom_right"),
    Case(F16, batch=2, seq_q=100, seq_kv=600, head_dim=128, head_dim_v=96),
    Case(BF16, heads_q=2, heads_kv=2, seq_q=300, seq_kv=300, head_dim=256, head_dim_v=192, causal="top_left"),
)


@pytest.mark.parametrize("case", ORDERED_CALLS, ids=str)
def test_sums_in_order(case: Case) -> None:
    emulated = Emulated("sm_90a", race_check=True, units=1, deterministic=True)
    oracle.verify(case, emulated)
    assert any(dict(config.constants).get("ordered") for config in emulated.ran)


def test_every_seed_gives_the_same_bits() -> None:
    case = Case(BF16, seq_q=150, seq_kv=400, head_dim=64, head_dim_v=64, causal="bottom_right")
    inputs = oracle.make_inputs(case)
    results = [Emulated("sm_90a", seed=seed, units=1)(inputs.q, inputs.k, inputs.v) for seed in range(4)]
    assert all(torch.equal(other, results[0]) for other in results[1:])


FORWARD, BACKWARD, WIDE = "forward_warpgroups", "backward_warpgroups", "backward_wide"
ORDERED = "ordered"  # backward_warpgroups where results must be the same every time
# Kernel, what of its text is replaced where it is found first (an expression, not to age too fast), and by what.
FAULTS = {
    "keys are not waited for": (FORWARD, r"m\.keys_turn\[\S+?\.wait_full\(\S+?\);", ""),
    "values are not waited for": (FORWARD, r"m\.values_turn\[\S+?\.wait_full\(\S+?\);", ""),
    "queries are not waited for": (FORWARD, r"m\.query_turn\[\S+?\.wait_full\(\S+?\);", ""),
    "stages are filled again too early": (FORWARD, r"turn\.wait_free\(at\.round\);", ""),
    "bytes are missing": (FORWARD, r"turn\.expect\(KeyRows::bytes\);", "turn.expect(KeyRows::bytes + 128);"),
    "values are given back before they are used": (
        FORWARD, r"(ptx::wgmma_wait<0>\(\);)(\s+)(sums_are_there\(before\);)", r"\3\2\1",
    ),
    "weights are made of scores that are not there": (FORWARD, r"ptx::wgmma_wait<1>\(\);", ""),
    "sums are changed while products add to them": (FORWARD, r"ptx::wgmma_wait<0>\(\);(\s+sums_are_there)", r"\1"),
    "products begin without a fence": (FORWARD, r"ptx::wgmma_fence\(\);", ""),
    "the output goes elsewhere": (FORWARD, r"out_map, row, b\.first \+ row", "out_map, row, b.first + row + 1"),
    "the output is stored without a fence": (FORWARD, r"(out\.put\(.*?;\s+)ptx::fence_proxy_async\(\);", r"\1"),
    "an mbarrier expects others": (FORWARD, r"(values_turn\) turn\.init)\(\S+\);", r"\1(1);"),
    "a turn is not passed on": (FORWARD, r"if constexpr \(C::turns\) pass_turn\(group\);", ""),
    "gradients are not waited for": (BACKWARD, r"m\.rows\.grad_out_turn\[\S+?\.wait_full\(\S+?\);", ""),
    "gradients are used without a fence": (BACKWARD, r"ptx::fence_proxy_async\(\);(\s+ptx::mbarrier_arrive)", r"\1"),
    "gradients of others are not waited for": (BACKWARD, r"\(paired \? turns\.far : turns\.own\)\S+?;", ";"),
    "keys are put over those in use": (BACKWARD, r"ptx::sync_some\(everyone, 128 \* groups\);", ""),
    "rows are given back before they are used": (BACKWARD, r"tiles_done - 1\)\.stage\)", "tiles_done).stage)"),
    "sums are stored without a fence": (BACKWARD, r"(values\.put\(.*?;\s+)ptx::fence_proxy_async\(\);", r"\1"),
    "sums are stored before all have put theirs": (BACKWARD, r"ptx::sync_some\(own \+ group, 128\);", ""),
    "weights are not waited for": (WIDE, r"m\.weights_turn\[\S+?\.wait_full\(\S+?\);", ";"),
    "gradients of scores are not waited for": (WIDE, r"\(paired \? turns\.far : turns\.own\)\S+?;", ";"),
    "gradients of scores are used without a fence": (
        WIDE, r"(put_operands<Scores>\(words\);\s+)ptx::fence_proxy_async\(\);", r"\1",
    ),
    "dQ is added before it is there": (WIDE, r"ptx::wgmma_wait<1>\(\);(\s+grad_q\.deliver)", r"\1"),
    "gradients are sent before they are there": (WIDE, r"own\[at\.stage\]\.wait_full\(\S+?\);(\s+far)", r"\1"),
    "gradients are put over those that are being sent": (WIDE, r"m\.grad_query_turns\.wait_free\(\S+?\);", ""),
    "the other block is not told": (WIDE, r"if \(arch::lane\(\) == 0\)\s+ptx::mbarrier_arrive_far\(.*?;", ""),
    "a block ends while the other one needs it": (WIDE, r"ptx::sync_warp\(\);\s+ptx::sync_cluster\(\);", ""),
    "a turn is not passed on to the next keys": (ORDERED, r"ptx::add_release_global\(.*?;", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, old, new = FAULTS[fault]

    def assemble(config: KernelConfig, on: target.Target) -> str:
        text = emulator.assemble(config, on)
        if config.kernel != (BACKWARD if kernel == ORDERED else kernel):
            return text
        text, count = re.subn(old, new, text, count=1)
        planted.append(count)
        return text

    planted: list[int] = []
    monkeypatch.setattr(attention, "assemble", assemble)
    dim = 256 if kernel == WIDE else 64
    case = Case(BF16, heads_q=2, heads_kv=2, seq_q=330, seq_kv=600, head_dim=dim, head_dim_v=dim, causal="bottom_right")
    seen = None
    try:
        oracle.verify(case, Emulated("sm_90a", race_check=True, units=1, deterministic=kernel == ORDERED))
    except (EmulatorError, AssertionError) as error:
        seen = error
    assert planted == [1], f"{kernel} has nothing like {old!r} any more: plant another fault"
    assert seen
