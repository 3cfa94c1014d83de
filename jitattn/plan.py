"""Problem and target -> plan: which kernels run, in which order, with which tiles and how many blocks.

Pure functions and data. Tile shapes are rows of tables/TABLE.json: the first row that fits a problem is taken, and
among its candidates the one that suits the lengths and the machine's units.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import KernelConfig, KernelName
from .errors import Unsupported
from .problem import Problem
from .target import Target

__all__ = ["Plan", "Step", "make_plan", "replace_table"]

# The host: fewer blocks than this for each core would leave cores idle at the end of a launch.
_BLOCKS_PER_CORE = 4

# GPUs: a split of the keys has at least so many, or writing and reading its sums costs more than it gains.
_KEYS_PER_SPLIT = 256
_MAX_SPLITS = 64
_MAX_BLOCKS = 2**31 - 1  # of one launch, and what kernels count blocks with
# kernel_src/arch/gpu/attn/workspace.h rounds query rows, and columns of partial outputs and of sums of dQ, up to these.
_ROWS_AT_ONCE, _OUT_COLUMNS, _GRAD_QUERY_COLUMNS = 128, 32, 64
_MAGNITUDES = 32  # of each head of floats: kernel_src/arch/gpu/attn/magnitude.h


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
    """Runs that the keys are cut into: of a backward pass on the host, each with its own partial dQ, and of a forward
    pass on a GPU, each with its own partial output."""
    workspace_bytes: int = 0
    """What the steps share beyond the problem's tensors. Kernels of the host say for themselves what they need."""


@functools.lru_cache(maxsize=4096)
def make_plan(problem: Problem, target: Target) -> Plan:
    """The plan for a problem on a target. It depends on nothing else, so it is the same in every process.

    :raises Unsupported: the architecture has no kernels for the problem.
    """
    if target.vendor == "host":
        return _host_forward(problem, target) if problem.direction == "forward" else _host_backward(problem, target)
    _check_gpu(problem, target)
    plan = _gpu_forward(problem, target) if problem.direction == "forward" else _gpu_backward(problem, target)
    if any(step.blocks > _MAX_BLOCKS for step in plan.steps):
        raise Unsupported(f"{problem}: a launch has at most {_MAX_BLOCKS} blocks; cut the batch into parts")
    return plan


# ------------------------------------------------------------------------------------------------ tables


def replace_table(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """Put other rows in the place of a table's, for this process, and return those that were there. For tuning: calls
    that have been made keep their kernels."""
    before = _table(name)
    _tables[name] = table
    make_plan.cache_clear()
    return before


_tables: dict[str, dict[str, Any]] = {}


def _table(name: str) -> dict[str, Any]:
    if name not in _tables:
        path = Path(__file__).parent / "tables" / f"{name}.json"
        own = json.loads(path.read_text(encoding="utf-8"))
        # The rows of a table that this one goes on from come after its own.
        base = _table(own["goes_on"]) if "goes_on" in own else {}
        rows = {
            kernel: [*own.get(kernel, []), *base.get(kernel, [])] for kernel in own | base if kernel not in _NO_ROWS
        }
        _tables[name] = base | own | rows
    return _tables[name]


_NO_ROWS = {"about", "defaults", "goes_on"}


def _row(kernel: KernelName, problem: Problem, target: Target, by_boxes: bool = True) -> dict[str, Any]:
    """The first row whose conditions the problem meets."""
    rows = [row for row in _table(target.table)[kernel] if by_boxes or row.get("kernel") not in _BY_BOXES]
    found = next((row for row in rows if _fits(row, problem, target)), None)
    if found is None:
        largest = max(row["max_head_dim"] for row in rows if _fits({**row, "max_head_dim": None}, problem, target))
        raise Unsupported(
            f"no {problem.dtype} {kernel} kernel for head dims {problem.head_dim} (q, k) and {problem.head_dim_v} (v) "
            f'on {target}: they may be up to {largest}; backend="reference" takes any'
        )
    return found


def _fits(row: dict[str, Any], problem: Problem, target: Target) -> bool:
    largest = row["max_head_dim"]
    return (
        target.arch in row.get("archs", (target.arch,))
        and (largest is None or max(problem.head_dim, problem.head_dim_v) <= largest)
        and problem.head_dim >= row.get("min_head_dim", 0)
        and row.get("min_seq_kv", 0) <= problem.seq_kv <= row.get("max_seq_kv", problem.seq_kv)
        and problem.dtype in row.get("dtypes", (problem.dtype,))
        and row.get("causal", problem.causal) == problem.causal
        and row.get("deterministic", problem.deterministic) == problem.deterministic
        and (row.get("kernel") not in _BY_BOXES or _moves_by_boxes(problem))
    )


_BY_BOXES = {"forward_warpgroups", "backward_warpgroups", "backward_wide"}


def _moves_by_boxes(problem: Problem) -> bool:
    """Whether the kernels of sm_90 take the tensors: the copy engine wants rows of whole 16-byte pieces and strides
    other than 0, and what arrives is multiplied as it is, with no sign changed for the scale."""
    return (
        problem.alignment % 16 == 0
        and not problem.repeats
        and problem.head_dim % 8 == 0
        and problem.head_dim_v % 8 == 0
        and problem.seq_kv > 0
        and problem.scale > 0
    )


# ------------------------------------------------------------------------------------------------ the host


def _host_forward(problem: Problem, target: Target) -> Plan:
    return Plan((_host_query_step("forward", problem, target),))


def _host_backward(problem: Problem, target: Target) -> Plan:
    config = _host_config("backward", problem, target, _row("backward", problem, target)["block_m"][0])
    splits = _host_splits(problem.batch * problem.heads_kv, _ceil_div(problem.seq_kv, config.block_n), target.units)
    steps = [Step(config, problem.batch * problem.heads_kv * splits)]
    if splits > 1:
        steps.append(_host_query_step("reduce_grad_query", problem, target))
    return Plan(tuple(steps), splits)


def _host_splits(heads: int, tiles: int, units: int) -> int:
    """Into how many runs the keys of each head are cut: as few as keep the cores busy, since each costs a dQ."""
    wanted = _ceil_div(_BLOCKS_PER_CORE * units, max(heads, 1))
    return max(1, min(wanted, tiles))


def _host_query_step(kernel: KernelName, problem: Problem, target: Target) -> Step:
    """A kernel whose blocks are runs of query rows: the longest that leave enough blocks for all cores."""
    heads = problem.batch * problem.heads_q
    candidates = _row(kernel, problem, target)["block_m"]
    enough = (m for m in candidates if heads * _ceil_div(problem.seq_q, m) >= _BLOCKS_PER_CORE * target.units)
    block_m = next(enough, candidates[-1])
    return Step(_host_config(kernel, problem, target, block_m), heads * _ceil_div(problem.seq_q, block_m))


def _host_config(kernel: KernelName, problem: Problem, target: Target, block_m: int) -> KernelConfig:
    row = _row(kernel, problem, target)
    sees_keys = kernel != "reduce_grad_query"  # the others compile once for all masks and widths of V
    return KernelConfig(
        kernel=kernel,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v if sees_keys else problem.head_dim,
        causal=problem.causal and sees_keys,
        block_m=block_m,
        block_n=_host_block_n(row["block_n"], problem.seq_kv),
        # Without bf16_dot 16-bit inputs are widened to float32 first.
        constants=(("panel", row["panel"]), ("bf16_dot", target.bf16_dot and problem.dtype == "bfloat16")),
    )


def _host_block_n(candidates: list[int], seq_kv: int) -> int:
    """The largest tile that cuts the keys into several: under a mask, parts of tiles are lost work."""
    return next((n for n in candidates if seq_kv >= 4 * n), candidates[-1])


# ------------------------------------------------------------------------------------------------ GPUs


def _check_gpu(problem: Problem, target: Target) -> None:
    if problem.dtype == "bfloat16" and not target.bf16_dot:
        raise Unsupported(f"{target} multiplies no bfloat16, which begins with sm_80: use float16 or float32")


def _gpu_forward(problem: Problem, target: Target) -> Plan:
    tile, blocks, splits = _gpu_forward_tile(problem, target)
    kernel = tile.pop("kernel", "forward")
    if kernel in _BY_BOXES:
        if splits == 1:  # blocks of threads take one block of rows after the other
            return Plan((Step(_gpu_config(kernel, problem, tile, vector=False), min(blocks, target.units)),))
        tile, blocks, splits = _gpu_forward_tile(problem, target, by_boxes=False)
    magnitudes, workspace = _gpu_magnitudes(problem, target)
    steps = [*magnitudes, Step(_gpu_config("forward", problem, tile, vector=True, split=splits > 1), blocks * splits)]
    if splits > 1:
        steps.append(_gpu_rows_step("combine", problem, target))
        rows = problem.batch * problem.heads_q * problem.seq_q
        workspace += 4 * splits * rows * (_round_up(problem.head_dim_v, _OUT_COLUMNS) + 1)  # sums and an LSE
    return Plan(tuple(steps), splits, workspace)


def _gpu_forward_tile(problem: Problem, target: Target, by_boxes: bool = True) -> tuple[dict[str, Any], int, int]:
    """The tile, the number of blocks of query rows, and into how many runs the keys are cut."""
    heads = problem.batch * problem.heads_q
    tile = _gpu_tile("forward", problem, target, heads, problem.seq_q, "block_m", by_boxes)
    blocks = heads * _ceil_div(problem.seq_q, tile["block_m"])
    splits = _gpu_splits(blocks, problem.seq_kv, tile["block_n"], target.units, tile["blocks_per_unit"])
    return tile, blocks, splits


def _gpu_backward(problem: Problem, target: Target) -> Plan:
    heads_q, heads_kv = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    tile = _gpu_tile("backward", problem, target, heads_kv, problem.seq_kv, "block_n")
    if tile.get("kernel") in _BY_BOXES:
        return _gpu_backward_by_boxes(problem, target, tile)
    blocks = heads_kv * _ceil_div(problem.seq_kv, tile["block_n"])
    alone = tile.pop("alone", False)  # each gradient by a pass of its own, where registers or shared memory are few
    # Sums of dQ that blocks add to as they finish differ in their last bits from run to run.
    sums = not (problem.deterministic or alone)

    def backward(keys: bool, values: bool) -> Step:
        constants = {"grad_keys": keys, "grad_values": values, "grad_query": keys and sums}
        return Step(_gpu_config("backward", problem, tile, vector=True, **constants), blocks)

    steps, workspace = _gpu_magnitudes(problem, target)
    steps.append(_gpu_rows_step("delta", problem, target, vector=True, clear=sums, ordered=False))
    steps += [backward(False, True), backward(True, False)] if alone else [backward(True, True)]
    if sums:
        steps.append(_gpu_rows_step("store_grad_query", problem, target))
    else:
        own = _gpu_tile("grad_query", problem, target, heads_q, problem.seq_q, "block_m")
        config = _gpu_config("grad_query", problem, own, vector=True)
        steps.append(Step(config, heads_q * _ceil_div(problem.seq_q, own["block_m"])))
    return Plan(tuple(steps), 1, workspace + _gpu_row_data(problem, sums, ordered=False))


def _gpu_backward_by_boxes(problem: Problem, target: Target, tile: dict[str, Any]) -> Plan:
    kernel, cluster = tile.pop("kernel"), tile["cluster"]
    keys = _ceil_div(problem.seq_kv, cluster * tile["block_n"])  # blocks of them in a head, for a cluster each
    complete = keys == 1  # dQ needs no sums
    ordered = problem.deterministic and not complete
    # Clusters take one piece of work after the other: kernel_src/arch/sm90/attn/tiles.h, KeyBlocks.
    at_once = max(1, target.units // cluster)
    paired = problem.causal and keys % 2 == 0 and (not ordered or keys // 2 <= at_once)
    pieces = keys // 2 if paired else keys
    if ordered and pieces < at_once:
        at_once -= at_once % pieces  # each has the same piece of every head, and so they stay as far apart as they are
    blocks = cluster * min(problem.batch * problem.heads_kv * pieces, at_once)
    steps = [
        _gpu_rows_step("delta", problem, target, vector=True, clear=not complete, ordered=ordered),
        Step(_gpu_config(kernel, problem, tile, vector=False, complete=complete, ordered=ordered), blocks),
    ]
    if not complete:
        steps.append(_gpu_rows_step("store_grad_query", problem, target))
    return Plan(tuple(steps), 1, _gpu_row_data(problem, not complete, ordered))


def _gpu_row_data(problem: Problem, sums: bool, ordered: bool) -> int:
    """Bytes of what a backward pass keeps of the query rows: LSE, delta, sums of dQ, whose turn it is to add to them.
    See kernel_src/arch/gpu/attn/workspace.h."""
    floats = 2 + (_round_up(problem.head_dim, _GRAD_QUERY_COLUMNS) if sums else 0) + ordered
    return 4 * problem.batch * problem.heads_q * _round_up(problem.seq_q, _ROWS_AT_ONCE) * floats


def _gpu_magnitudes(problem: Problem, target: Target) -> tuple[list[Step], int]:
    """Where elements are floats: the kernel that finds how large those of each head are, and the bytes of what it
    finds, with which the workspace begins."""
    if problem.dtype != "float32":
        return [], 0
    heads = problem.batch * (problem.heads_q + 2 * problem.heads_kv)
    kernel: KernelName = "largest"
    if problem.direction == "backward":
        heads += 2 * problem.batch * problem.heads_q
        kernel = "largest_backward"
    (tile,) = _gpu_candidates(kernel, problem, target)
    config = _gpu_config(kernel, problem, tile, vector=True)
    return [Step(config, _ceil_div(heads * _MAGNITUDES, tile["warps"]))], 4 * heads * _MAGNITUDES


def _gpu_tile(
    kernel: KernelName, problem: Problem, target: Target, heads: int, length: int, side: str, by_boxes: bool = True
) -> dict[str, Any]:
    """The candidate that is done first: each unit works through its share of the blocks, and a block takes as long as
    its `side` (which cuts the length) is high. `speed` is how fast a candidate is where there is plenty to do."""

    other, width = ("block_n", problem.seq_kv) if side == "block_m" else ("block_m", problem.seq_q)

    def time(tile: dict[str, Any]) -> float:
        blocks = heads * _ceil_div(length, tile[side])
        walk = _round_up(width, tile[other])  # parts of tiles take as long as whole ones
        return _ceil_div(blocks, target.units) * tile[side] * walk / tile.get("speed", 1.0)

    return min(_gpu_candidates(kernel, problem, target, by_boxes), key=time)


def _gpu_candidates(
    kernel: KernelName, problem: Problem, target: Target, by_boxes: bool = True
) -> list[dict[str, Any]]:
    """The row's, completed by the table's defaults."""
    row = _row(kernel, problem, target, by_boxes)
    common = _table(target.table).get("defaults", {}) | ({"kernel": row["kernel"]} if "kernel" in row else {})
    return [common | tile for tile in row["tiles"]]


def _gpu_splits(blocks: int, seq_kv: int, block_n: int, units: int, blocks_per_unit: int) -> int:
    """Into how many runs the keys are cut where there are blocks of query rows for less than half of the GPU."""
    most = min(units * blocks_per_unit // max(blocks, 1), seq_kv // _KEYS_PER_SPLIT, _MAX_SPLITS)
    if blocks == 0 or 2 * blocks > units or most < 2:
        return 1
    tiles = _ceil_div(seq_kv, block_n)
    return _ceil_div(tiles, _ceil_div(tiles, most))  # as few as leave each this many tiles


def _gpu_rows_step(
    kernel: KernelName, problem: Problem, target: Target, vector: bool = False, **constants: int | bool
) -> Step:
    """A kernel that looks at each query row for itself."""
    (tile,) = _gpu_candidates(kernel, problem, target)
    blocks = problem.batch * problem.heads_q * _ceil_div(problem.seq_q, tile["block_m"])
    return Step(_gpu_config(kernel, problem, tile, vector, **constants), blocks)


_MASKED = {"forward", "backward", "grad_query"} | _BY_BOXES


def _gpu_config(
    kernel: KernelName, problem: Problem, tile: dict[str, Any], vector: bool, **constants: int | bool
) -> KernelConfig:
    """`vector`: whether the kernel reads the caller's tensors, so that their alignment matters."""
    if vector:
        # Bytes that are loaded at once; 0 for elements that lie apart.
        constants["vector"] = problem.alignment if problem.alignment > 1 else 0
    of_row = {name: value for name, value in tile.items() if name not in ("block_m", "block_n", "speed")}
    return KernelConfig(
        kernel=kernel,
        dtype=problem.dtype,
        # What a kernel does not look at is not compiled in: one serves all.
        head_dim=problem.head_dim_v if kernel == "combine" else problem.head_dim,
        head_dim_v=problem.head_dim if kernel == "store_grad_query" else problem.head_dim_v,
        causal=problem.causal and kernel in _MASKED,
        block_m=tile["block_m"],
        block_n=tile["block_n"],
        constants=tuple((of_row | constants).items()),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b
