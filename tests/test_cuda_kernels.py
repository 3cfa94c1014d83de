"""Every row of every CUDA table, and every target, compiled: registers and shared memory are enough.

Through the pipeline and so through the cache: a second run compiles nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jitattn import plan, target
from jitattn.config import KernelConfig
from jitattn.errors import ToolchainMissing
from jitattn.pipeline import resolve
from jitattn.problem import Problem
from jitattn.target import Target
from jitattn.toolchain import nvrtc

BASE = Problem(
    direction="forward", dtype="float16", head_dim=64, head_dim_v=64, causal=True, seq_q=4096, seq_kv=4096, batch=4,
    heads_q=16, heads_kv=16, diagonal=0, scale=0.125, alignment=16,
)  # fmt: skip
# The one architecture for which each table is compiled as a whole: the rest differ in little but their name.
OF_TABLE = {"sm_75": "sm_75", "sm_80": "sm_80", "sm_86": "sm_86", "sm_90": "sm_90", "sm_90a": "sm_90a"}
MARGIN = 1 << 10  # of shared memory, that each block costs beyond its own
# Bytes of a thread's registers. A few that wait in the cache cost nothing that shows: on an H200 these tiles are faster
# than the next ones that spill nothing (docs/benchmarks/h200.md).
MAY_SPILL = 64
MAY_SPILL_WIDE_FLOATS = 128  # float32 beyond head dim 128: 91 TFLOP/s forward where a tile that spills 12 reaches 76
MAY_SPILL_BY_BOXES = 96  # Hopper's: in warps that bring and help, which have 24 registers and time
MAY_SPILL_ON_VOLTA = 2048  # the same there, where operands are put together by shuffles: slow, but there


@dataclass(frozen=True)
class Candidate:
    """One candidate of one row of a table."""

    table: str
    kernel: str
    row: int
    tile: int

    def __str__(self) -> str:
        return f"{self.table}-{self.kernel}-{self.row}-{self.tile}"


def candidates() -> Iterator[Candidate]:
    for table in OF_TABLE:
        goes_on = plan._table(table).get("goes_on")
        base = plan._table(goes_on) if goes_on else {}
        for kernel, rows in plan._table(table).items():
            if isinstance(rows, list):
                for row, content in enumerate(rows):
                    if content in base.get(kernel, []):
                        continue
                    yield from (Candidate(table, kernel, row, tile) for tile in range(len(content["tiles"])))


def compiled(problem: Problem, on: Target) -> dict[KernelConfig, dict[str, Any]]:
    """Configuration -> resources of the problem's kernels, if there is a compiler for them."""
    _needs_compiler(on.arch)
    return {kernel.config: kernel.artifact.meta["resources"] for kernel in resolve(problem, on).kernels}


@functools.cache
def _needs_compiler(arch: str) -> None:
    try:
        nvrtc.find(arch)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))


def check(config: KernelConfig, resources: dict[str, Any], on: Target) -> None:
    constants = dict(config.constants)
    wide_floats = config.dtype == "float32" and config.head_dim > 128
    limit = MAY_SPILL_WIDE_FLOATS if wide_floats else MAY_SPILL_BY_BOXES if "cluster" in constants else MAY_SPILL
    if on.arch == "sm_70":
        limit = MAY_SPILL_ON_VOLTA if wide_floats else MAY_SPILL
    assert max(resources["spill_bytes"], resources["stack_bytes"]) <= limit, f"{config}: {resources}"
    assert "warnings" not in resources, f"{config}: {resources['warnings']}"
    assert resources["threads"] == 32 * constants["warps"]
    needed = resources["shared_bytes"] + resources["static_shared_bytes"]
    assert needed <= on.shared_bytes, f"{config}: {needed} of {on.shared_bytes} bytes of shared memory"
    together = constants["blocks_per_unit"] * (needed + MARGIN)
    assert together <= on.shared_bytes + MARGIN, f"{config}: {constants['blocks_per_unit']} blocks do not fit"


def test_every_table_has_an_architecture() -> None:
    assert set(OF_TABLE) == {target.parse(arch).table for arch in target.CUDA_ARCHS}


@pytest.mark.parametrize("candidate", list(candidates()), ids=str)
def test_a_row_compiles(candidate: Candidate) -> None:
    before = plan._table(candidate.table)
    row = before[candidate.kernel][candidate.row]
    kernel = row.get("kernel", candidate.kernel)
    on = target.parse(row.get("archs", [OF_TABLE[candidate.table]])[0])
    _needs_compiler(on.arch)
    only = row | {"tiles": [row["tiles"][candidate.tile]]}
    # The rest serves problems that are not this row's.
    plan.replace_table(
        candidate.table, before | {candidate.kernel: [only, *before[candidate.kernel][candidate.row + 1 :]]}
    )
    try:
        for problem in _problems(kernel, row, on):
            found = compiled(problem, on)
            for config, resources in found.items():
                if config.kernel == kernel:
                    check(config, resources, on)
            assert any(config.kernel == kernel for config in found)
    finally:
        plan.replace_table(candidate.table, before)


def _problems(kernel: str, row: dict[str, Any], on: Target) -> Iterator[Problem]:
    """Problems at the row's limit that need the kernel."""
    largest = row["max_head_dim"]
    if on.table == "sm_75" and kernel not in ("forward", "backward", "grad_query"):
        largest = 64  # beyond, the plan's other kernels find no room, or make all sums themselves
    problem = replace(
        BASE,
        dtype=next(dtype for dtype in row.get("dtypes", ["float16"]) if dtype != "bfloat16" or on.bf16_dot),
        head_dim=largest,
        head_dim_v=largest,
        causal=row.get("causal", True),
        deterministic=row.get("deterministic", kernel == "grad_query"),
    )
    if kernel in ("forward", "forward_warpgroups", "largest"):
        yield problem
    if kernel in ("forward", "largest", "combine"):
        yield replace(problem, batch=1, heads_q=2, heads_kv=1, seq_q=16)  # the keys are split
    if kernel in ("forward", "forward_warpgroups", "largest", "combine"):
        return
    yield replace(problem, direction="backward")
    if kernel.startswith("backward") and "deterministic" not in row:
        yield replace(problem, direction="backward", deterministic=True)


@pytest.mark.parametrize("arch", [arch for arch in target.CUDA_ARCHS if arch not in OF_TABLE.values()])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_other_target_compiles(arch: str, dtype: str) -> None:
    on = target.parse(arch)
    if dtype == "bfloat16" and not on.bf16_dot:
        pytest.skip(f"{arch} has no bfloat16")
    dims = (64, 128) if arch == "sm_70" else (64,)  # which has rows of its own
    for direction, dim in itertools.product(("forward", "backward"), dims):
        problem = replace(BASE, dtype=dtype, direction=direction, head_dim=dim, head_dim_v=dim)
        for config, resources in compiled(problem, on).items():
            check(config, resources, on)


@pytest.mark.parametrize("arch", ["compute_75", "compute_80"])
def test_ptx_for_newer_gpus_compiles(arch: str) -> None:
    for direction in ("forward", "backward"):
        for resources in compiled(replace(BASE, direction=direction), target.parse(arch)).values():
            assert resources["threads"] and "shared_bytes" in resources


ODD = [
    {"head_dim": 17, "head_dim_v": 17, "alignment": 2},
    {"head_dim": 100, "head_dim_v": 36, "alignment": 8},
    {"head_dim": 1, "head_dim_v": 7, "alignment": 4, "dtype": "float32"},
    {"head_dim": 66, "head_dim_v": 66, "alignment": 4},
    {"head_dim": 16, "head_dim_v": 256, "alignment": 1},
    {"head_dim": 64, "head_dim_v": 64, "alignment": 1, "dtype": "float32"},
    {"head_dim": 64, "head_dim_v": 64, "alignment": 4, "dtype": "float32"},
    {"head_dim": 64, "head_dim_v": 64, "alignment": 2},
]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("change", ODD, ids=lambda change: "-".join(map(str, change.values())))
def test_odd_head_dims_and_alignments_compile(arch: str, change: dict[str, Any]) -> None:
    on = target.parse(arch)
    for direction, deterministic in (("forward", False), ("backward", False), ("backward", True)):
        problem = replace(BASE, direction=direction, deterministic=deterministic, **change)  # type: ignore[arg-type]
        for config, resources in compiled(problem, on).items():
            check(config, resources, on)
