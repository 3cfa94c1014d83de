"""Problem and target -> plan: which kernels run, in which order, with which tiles and how many blocks.

Pure functions and data. Tile shapes are rows of tables/ARCH.json; a row is chosen by head dim, and among its candidates
by how many blocks the lengths leave for the machine's cores.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import KernelConfig, KernelName
from .problem import Problem
from .target import Target

__all__ = ["Plan", "Step", "make_plan"]

# Fewer blocks than this for each core would leave cores idle at the end of a launch.
_BLOCKS_PER_UNIT = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: a kernel and the number of its blocks."""

    config: KernelConfig
    blocks: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a problem, in order, and the run-time choices that they share."""

    steps: tuple[Step, ...]
    splits: int = 1
    """Backward: runs that the keys are cut into, each with its own partial dQ."""


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, target: Target) -> Plan:
    """The plan for a problem on a target. It depends on nothing else, so it is the same in every process."""
    if problem.direction == "forward":
        return Plan((_query_step("forward", problem, target),))
    return _plan_backward(problem, target)


def _plan_backward(problem: Problem, target: Target) -> Plan:
    config = _config("backward", problem, target, _row("backward", problem, target)["block_m"][0])
    splits = _splits(problem.batch * problem.heads_kv, _ceil_div(problem.seq_kv, config.block_n), target.units)
    steps = [Step(config, problem.batch * problem.heads_kv * splits)]
    if splits > 1:
        steps.append(_query_step("reduce_grad_query", problem, target))
    return Plan(tuple(steps), splits)


def _splits(heads: int, tiles: int, units: int) -> int:
    """Into how many runs the keys of each head are cut: as few as keep the cores busy, since each costs a dQ."""
    wanted = _ceil_div(_BLOCKS_PER_UNIT * units, max(heads, 1))
    return max(1, min(wanted, tiles))


def _query_step(kernel: KernelName, problem: Problem, target: Target) -> Step:
    """A kernel whose blocks are runs of query rows: the longest that leave enough blocks for all cores."""
    heads = problem.batch * problem.heads_q
    candidates = _row(kernel, problem, target)["block_m"]
    enough = (m for m in candidates if heads * _ceil_div(problem.seq_q, m) >= _BLOCKS_PER_UNIT * target.units)
    block_m = next(enough, candidates[-1])
    return Step(_config(kernel, problem, target, block_m), heads * _ceil_div(problem.seq_q, block_m))


def _config(kernel: KernelName, problem: Problem, target: Target, block_m: int) -> KernelConfig:
    row = _row(kernel, problem, target)
    sees_keys = kernel != "reduce_grad_query"  # the others compile once for all masks and widths of V
    return KernelConfig(
        kernel=kernel,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v if sees_keys else problem.head_dim,
        causal=problem.causal and sees_keys,
        block_m=block_m,
        block_n=_block_n(row["block_n"], problem.seq_kv),
        panel=row["panel"],
        bf16_dot=target.bf16_dot and problem.dtype == "bfloat16",
    )


def _block_n(candidates: list[int], seq_kv: int) -> int:
    """The largest tile that cuts the keys into several: under a mask, parts of tiles are lost work."""
    return next((n for n in candidates if seq_kv >= 4 * n), candidates[-1])


def _row(kernel: KernelName, problem: Problem, target: Target) -> dict[str, Any]:
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(
        row
        for row in _table(target.vendor)[kernel]
        if (row["max_head_dim"] is None or widest <= row["max_head_dim"])
        and row.get("causal", problem.causal) == problem.causal
    )


@functools.cache
def _table(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "tables" / f"{name}.json").read_text(encoding="utf-8"))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
