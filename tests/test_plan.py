"""Plans for GPUs: pure functions of problem and target, so every GPU's can be looked at anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jitattn import plan, target
from jitattn.errors import Unsupported
from jitattn.plan import Plan, Step, make_plan
from jitattn.problem import DTYPES, Problem

TARGETS = [target.parse(arch) for arch in target.CUDA_ARCHS]
SM90, SM90A = target.parse("sm_90"), target.parse("sm_90a")
TABLES = sorted({on.table for on in TARGETS})

BASE = Problem(
    direction="forward", dtype="float16", head_dim=64, head_dim_v=64, causal=True, seq_q=500, seq_kv=700, batch=2,
    heads_q=8, heads_kv=4, diagonal=200, scale=0.125,
)  # fmt: skip


def kernels(made: Plan) -> list[str]:
    return [step.config.kernel for step in made.steps]


def constants(made: Plan, kernel: str) -> dict[str, Any]:
    (config,) = [step.config for step in made.steps if step.config.kernel == kernel]
    return dict(config.constants)


def refused(problem: Problem, on: target.Target) -> str:
    """Why there is no plan, as a pattern; "" if there is one."""
    if problem.dtype == "bfloat16" and not on.bf16_dot:
        return "bfloat16.*sm_80.*float16"
    # 64 KB of shared memory: four tiles of 16 rows of such floats are more.
    wide = problem.dtype == "float32" and max(problem.head_dim, problem.head_dim_v) > 240
    return "up to 240.*reference" if on.arch == "sm_75" and wide and problem.direction == "backward" else ""


@pytest.mark.parametrize("on", TARGETS, ids=str)
def test_every_head_dim_and_dtype_has_a_plan(on: target.Target) -> None:
    for dtype in DTYPES:
        for direction in ("forward", "backward"):
            for head_dim in range(1, 257):
                problem = replace(BASE, dtype=dtype, direction=direction, head_dim=head_dim)
                if reason := refused(problem, on):
                    with pytest.raises(Unsupported, match=reason):
                        make_plan(problem, on)
                else:
                    assert make_plan(problem, on).steps


@pytest.mark.parametrize("size", ["head_dim", "head_dim_v"])
def test_larger_head_dims_are_refused(size: str) -> None:
    with pytest.raises(Unsupported, match="257.*up to 256.*reference"):
        make_plan(replace(BASE, **{size: 257}), SM90)


@pytest.mark.parametrize("on", TARGETS, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_cover_every_row_and_key(on: target.Target, deterministic: bool) -> None:
    for length in (0, 1, 63, 64, 65, 128, 129, 784, 5000, 100_000):
        for head_dim in (16, 64, 96, 128, 200, 256):
            for direction in ("forward", "backward"):
                problem = replace(
                    BASE, direction=direction, head_dim=head_dim, seq_q=length, seq_kv=length,
                    deterministic=deterministic,
                )  # fmt: skip
                made = make_plan(problem, on)
                for step in made.steps:
                    heads, side = problem.batch * problem.heads_q, step.config.block_m
                    splits = made.splits if step.config.kernel == "forward" else 1
                    if step.config.kernel in ("backward", "backward_warpgroups", "backward_wide"):
                        heads, side = problem.batch * problem.heads_kv, step.config.block_n
                    blocks = splits * heads * -(-length // side)
                    if step.config.kernel in ("backward_warpgroups", "backward_wide"):
                        blocks = blocks_in_turns(step, heads, length, on.units)
                    if step.config.kernel == "forward_warpgroups":  # whose blocks take several
                        blocks = min(blocks, on.units)
                    assert step.blocks == blocks


def blocks_in_turns(step: Step, heads: int, length: int, units: int) -> int:
    """Of threads, for `heads` heads of so many keys."""
    of_step = dict(step.config.constants)
    cluster, ordered = of_step["cluster"], of_step["ordered"]
    most, pieces = units // cluster, -(-length // (step.config.block_n * cluster))
    if step.config.causal and pieces % 2 == 0 and (not ordered or pieces // 2 <= most):
        pieces //= 2  # two from both ends of a head
    if ordered and pieces < most:
        most = most // pieces * pieces  # each has the same piece of every head
    return cluster * min(heads * pieces, most)


def test_the_steps_of_a_backward() -> None:
    plain = make_plan(replace(BASE, direction="backward"), SM90)
    assert kernels(plain) == ["delta", "backward", "store_grad_query"]
    assert constants(plain, "delta")["clear"] is True and constants(plain, "backward")["grad_query"] is True
    fixed = make_plan(replace(BASE, direction="backward", deterministic=True), SM90)
    assert kernels(fixed) == ["delta", "backward", "grad_query"]
    assert constants(fixed, "delta")["clear"] is False and constants(fixed, "backward")["grad_query"] is False


def test_the_steps_of_a_backward_on_hopper() -> None:
    def made(seq_kv: int, head_dim: int, deterministic: bool) -> Plan:
        sizes = {"seq_kv": seq_kv, "head_dim": head_dim, "head_dim_v": head_dim}
        return make_plan(replace(BASE, direction="backward", deterministic=deterministic, **sizes), SM90A)

    for deterministic in (False, True):
        summed = made(4096, 128, deterministic)
        assert kernels(summed) == ["delta", "backward_warpgroups", "store_grad_query"]
        for step in ("delta", "backward_warpgroups"):
            assert constants(summed, step)["ordered"] is deterministic
        assert constants(summed, "delta")["clear"] is True
        # One block of keys, or a cluster of two, has all that there are.
        for seq_kv, head_dim in ((128, 64), (256, 128), (128, 256)):
            kernel = "backward_wide" if head_dim > 128 else "backward_warpgroups"
            whole = made(seq_kv, head_dim, deterministic)
            assert kernels(whole) == ["delta", kernel] and constants(whole, "delta")["clear"] is False
            assert constants(whole, kernel)["complete"] is True and constants(whole, kernel)["ordered"] is False
            assert whole.workspace_bytes < summed.workspace_bytes


@pytest.mark.parametrize("on", TARGETS, ids=str)
def test_tiles_of_a_backward_fit_the_workspace(on: target.Target) -> None:
    """Its rows are padded to 128 and its columns to 64: a tile must not reach beyond, or it adds to another's sums."""
    for dtype in DTYPES:
        for head_dim in range(1, 257):
            problem = replace(BASE, direction="backward", dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
            if refused(problem, on):
                continue
            for step in make_plan(problem, on).steps:
                assert 128 % step.config.block_m == 0
                if step.config.kernel == "backward":
                    pad = dict(step.config.constants)["pad"]
                    assert -(-head_dim // pad) * pad <= -(-head_dim // 64) * 64, f"{step.config}: pad {pad}"


def test_the_workspace_of_a_backward() -> None:
    problem = replace(BASE, direction="backward", seq_q=129, head_dim=40, head_dim_v=8)
    rows = problem.batch * problem.heads_q * 256
    assert make_plan(problem, SM90).workspace_bytes == 4 * rows * (2 + 64)
    assert make_plan(replace(problem, deterministic=True), SM90).workspace_bytes == 4 * rows * 2


def test_few_rows_split_the_keys() -> None:
    decode = replace(BASE, batch=1, heads_q=8, seq_q=1, seq_kv=100_000, causal=False, head_dim_v=40)
    made = make_plan(decode, SM90)
    assert kernels(made) == ["forward", "combine"] and made.splits > 1
    assert constants(made, "forward")["split"] is True
    assert made.steps[0].blocks == 8 * made.splits >= SM90.units / 2
    assert made.workspace_bytes == 4 * made.splits * 8 * (64 + 1)
    assert "split" not in constants(made, "combine")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seq_q": 4096, "seq_kv": 4096, "batch": 8}, "enough blocks of query rows"),
        ({"seq_q": 1, "seq_kv": 200, "batch": 1}, "too few keys"),
        ({"seq_q": 0, "seq_kv": 100_000}, "no query rows"),
        ({"seq_q": 1, "seq_kv": 0}, "no keys"),
        ({"batch": 0}, "no heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_are_not_split(change: dict[str, int], why: str) -> None:
    made = make_plan(replace(BASE, **change), SM90)
    assert kernels(made) == ["forward"] and made.splits == 1 and made.workspace_bytes == 0, why
    assert constants(made, "forward")["split"] is False


def test_no_split_is_without_keys() -> None:
    """As the kernel cuts them: whole tiles, equally many for each split but the last."""
    for seq_kv in range(512, 60_000, 97):
        made = make_plan(replace(BASE, batch=1, heads_q=4, heads_kv=1, seq_q=3, seq_kv=seq_kv), SM90)
        tiles = -(-seq_kv // made.steps[0].config.block_n)
        per_split = -(-tiles // made.splits)
        assert (made.splits - 1) * per_split < tiles <= made.splits * per_split


def test_alignment_is_compiled_into_what_reads_the_callers_tensors() -> None:
    for alignment, vector in ((16, 16), (8, 8), (4, 4), (2, 2), (1, 0)):
        problem = replace(BASE, alignment=alignment)
        assert constants(make_plan(problem, SM90), "forward")["vector"] == vector
        made = make_plan(replace(problem, direction="backward"), SM90)
        assert constants(made, "backward")["vector"] == constants(made, "delta")["vector"] == vector
        assert "vector" not in constants(made, "store_grad_query")
        fixed = make_plan(replace(problem, direction="backward", deterministic=True), SM90)
        assert constants(fixed, "grad_query")["vector"] == vector


def test_kernels_that_look_at_less_are_shared() -> None:
    made = make_plan(replace(BASE, direction="backward", head_dim_v=32), SM90)
    other = make_plan(replace(BASE, direction="backward", head_dim_v=48, causal=False), SM90)
    assert made.steps[-1].config == other.steps[-1].config
    decode = replace(BASE, batch=1, heads_q=4, seq_q=1, seq_kv=50_000)
    one, two = (make_plan(replace(decode, head_dim=d, causal=c), SM90) for d, c in ((64, True), (32, False)))
    assert one.steps[1].config == two.steps[1].config and one.steps[0].config != two.steps[0].config


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(Unsupported, match="2147483647 blocks"):
        make_plan(replace(BASE, batch=2**31, seq_q=1, seq_kv=1), SM90)


@pytest.mark.parametrize("tiles", [[(128, 1.0), (112, 1.0)], [(112, 1.0), (128, 1.0)]])
def test_lengths_choose_among_the_candidates(tiles: list[tuple[int, float]], replaced: Callable[..., None]) -> None:
    """784 is 7 x 112: blocks of 128 rows would have a seventh of their rows empty."""
    replaced(tiles)
    many = replace(BASE, batch=128, heads_q=16, heads_kv=16)
    assert make_plan(replace(many, seq_q=784), SM90).steps[0].config.block_m == 112
    assert make_plan(replace(many, seq_q=1024), SM90).steps[0].config.block_m == 128


def test_smaller_tiles_fill_a_gpu_though_they_are_slower(replaced: Callable[..., None]) -> None:
    replaced([(128, 1.0), (64, 0.8)])
    few = replace(BASE, batch=1, heads_q=8, heads_kv=8, seq_q=1024, seq_kv=1024)
    assert make_plan(few, SM90).steps[0].config.block_m == 64
    assert make_plan(replace(few, batch=16), SM90).steps[0].config.block_m == 128


@pytest.fixture
def replaced():
    """Put a forward row with candidates (block_m, speed) in place of sm_90's."""
    before = plan._table("sm_90")

    def put(candidates: list[tuple[int, float]]) -> None:
        tiles = [
            {"block_m": m, "block_n": 64, "warps": 4, "blocks_per_unit": 1, "speed": speed} for m, speed in candidates
        ]
        plan.replace_table("sm_90", before | {"forward": [{"max_head_dim": 256, "tiles": tiles}]})

    yield put
    assert plan.replace_table("sm_90", before) is not before


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_in_an_order_in_which_each_is_reached(name: str) -> None:
    """A row that an earlier one hides would be tuned in vain."""
    for kernel, rows in plan._table(name).items():
        if not isinstance(rows, list):
            continue
        for later, row in enumerate(rows):
            problem = replace(
                BASE,
                dtype=row.get("dtypes", ["float16"])[0],
                head_dim=row["max_head_dim"],
                causal=row.get("causal", True),
                deterministic=row.get("deterministic", False),
                alignment=16 if row.get("kernel") in plan._BY_BOXES else 8,
            )
            mine = [on for on in TARGETS if on.table == name and plan._fits(row, problem, on)]
            if not mine and "goes_on" in plan._table(name):
                continue  # a row of the other table for architectures that this one does not serve
            first = {next(i for i, earlier in enumerate(rows) if plan._fits(earlier, problem, on)) for on in mine}
            assert later in first, f"{name} {kernel}: row {later} is hidden by {first}"


def test_plans_are_the_same_in_another_process(run_python: Callable[..., str]) -> None:
    short = replace(BASE, seq_kv=9)
    problems = [short, replace(short, direction="backward"), BASE, replace(BASE, direction="backward")]
    text = (
        "import pickle, sys\n"
        "from jitattn import target\n"
        "from jitattn.plan import make_plan\n"
        f"problems = pickle.loads({pickle.dumps(problems)!r})\n"
        "print([make_plan(problem, target.parse('sm_90')) for problem in problems])\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert run_python(text).strip() == str([make_plan(problem, SM90) for problem in problems])
