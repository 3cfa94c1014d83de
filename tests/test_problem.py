"""What is compiled in and what is not: each Problem field's declared kind against the assembled source text."""

from __future__ import annotations

import functools
import random
from dataclasses import fields, replace

import pytest

from jitattn import source, target
from jitattn.config import KernelConfig
from jitattn.plan import make_plan
from jitattn.problem import DTYPES, Problem

KINDS = Problem.field_kinds()
BASES = [
    Problem(
        direction=direction,  # type: ignore[arg-type]
        dtype=dtype,
        head_dim=64,
        head_dim_v=64,
        causal=causal,
        seq_q=500,
        seq_kv=700,
        batch=2,
        heads_q=8,
        heads_kv=4,
        diagonal=200,
        scale=0.125,
    )
    for direction in ("forward", "backward")
    for dtype in ("float32", "bfloat16")
    for causal in (False, True)
]
# Other values of each field. A field that is added to Problem must be added here.
OTHERS: dict[str, tuple[object, ...]] = {
    "direction": ("forward", "backward"),
    "dtype": DTYPES,
    "head_dim": (1, 32, 63, 65, 128, 256, 320),
    "head_dim_v": (1, 32, 63, 65, 128, 256, 320),
    "causal": (False, True),
    "seq_q": (0, 1, 17, 63, 64, 500, 784, 100_000),
    "seq_kv": (0, 1, 17, 63, 64, 500, 784, 100_000),
    "batch": (0, 1, 3, 64, 100_000),
    "heads_q": (4, 12, 128),
    "heads_kv": (1, 2, 8),
    "diagonal": (0, -500, 1, 2**40),
    "scale": (0.0, -1.0, 1.0, 1e-30),
    "alignment": (16, 8, 4, 1),
    "repeats": (False, True),
    "deterministic": (False, True),
}
TARGETS = [target.parse(f"host:{arch}") for arch in target.HOST_ARCHS]
V4 = target.parse("host:x86-64-v4+bf16")
SM90, SM90A, SM75 = (target.parse(arch) for arch in ("sm_90", "sm_90a", "sm_75"))
# Head dims beyond these have no kernels on a GPU.
GPU_OTHERS = {name: tuple(v for v in OTHERS[name] if v <= 256) for name in ("head_dim", "head_dim_v")}  # type: ignore[operator]


@functools.cache
def _text(config: KernelConfig, on: target.Target) -> str:
    return source.assemble(config, on, "compiler 1.0").text


def texts(problem: Problem, on: target.Target = V4) -> tuple[str, ...]:
    """The source of every kernel that the problem needs, in order of launch."""
    return tuple(_text(step.config, on) for step in make_plan(problem, on).steps)


def test_every_field_has_a_kind_and_is_perturbed() -> None:
    assert set(KINDS.values()) <= {"compiled", "planned", "runtime", "gpu"}
    assert set(OTHERS) == {field.name for field in fields(Problem)} == set(KINDS)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_perturbing_a_field_changes_the_text_iff_it_is_compiled_in(name: str, base: Problem) -> None:
    seen = {texts(replace(base, **{name: value})) for value in OTHERS[name]}
    if KINDS[name] == "compiled":
        assert len(seen) == len(OTHERS[name])
    elif KINDS[name] in ("runtime", "gpu"):
        assert seen == {texts(base)}
    else:
        assert len({text for kernels in seen for text in kernels}) <= 4


@pytest.mark.parametrize("on", [SM90, SM90A], ids=str)
@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_on_a_gpu(name: str, base: Problem, on: target.Target) -> None:
    values = GPU_OTHERS.get(name, OTHERS[name])
    seen = [texts(replace(base, **{name: value}), on) for value in values]
    if KINDS[name] == "compiled" or name == "alignment":
        assert len(set(seen)) == len(seen)
    elif KINDS[name] == "runtime":
        assert set(seen) == {texts(base, on)}
    elif name == "deterministic":
        assert (seen[0] == seen[1]) == (base.direction == "forward")
    else:
        assert len({text for kernels in seen for text in kernels}) <= 8


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind != "compiled"])
def test_a_value_that_is_not_compiled_in_is_not_in_the_text(name: str) -> None:
    """Values that no tile size has would show as themselves."""
    odd = replace(BASES[0], **{name: 918_273})
    assert all("918273" not in text for text in texts(odd))
    if KINDS[name] != "gpu":
        assert all("918273" not in text for text in texts(odd, SM90))


@pytest.mark.parametrize("on", [V4, SM90, SM90A], ids=str)
@pytest.mark.parametrize("base", BASES, ids=str)
def test_serving_traffic_settles_on_a_handful_of_texts(base: Problem, on: target.Target) -> None:
    rng = random.Random(0)
    seen: set[str] = set()
    late = 0
    for count in range(3000):
        heads_kv = rng.choice([1, 2, 8])
        problem = replace(
            base,
            batch=rng.choice([1, 2, 16, 37]),
            heads_q=heads_kv * rng.choice([1, 4]),
            heads_kv=heads_kv,
            seq_q=rng.choice([1, rng.randint(1, 1000), rng.randint(1, 100_000)]),
            seq_kv=rng.choice([rng.randint(1, 1000), rng.randint(1, 100_000)]),
            diagonal=rng.randint(-100_000, 100_000),
            scale=rng.uniform(-2, 2),
        )
        new = set(texts(problem, on)) - seen
        seen |= new
        late += bool(new) and count > 300
    assert len(seen) <= 8
    assert late == 0, "kernels were still being compiled after 300 calls"


@pytest.mark.parametrize("on", TARGETS, ids=str)
def test_the_text_depends_on_the_target_and_the_compiler(on: target.Target) -> None:
    step = make_plan(BASES[0], on).steps[0]
    here = source.assemble(step.config, on, "compiler 1.0")
    assert here.text != source.assemble(step.config, on, "compiler 1.1").text
    assert here.digest != source.assemble(step.config, on, "compiler 1.1").digest
    others = [source.assemble(step.config, other, "compiler 1.0").text for other in TARGETS if other != on]
    assert here.text not in others
    assert here == source.assemble(step.config, on, "compiler 1.0")


def test_the_number_of_cores_is_not_compiled_in() -> None:
    few, many = replace(V4, units=1), replace(V4, units=128)
    for base in BASES:
        both = {text for on in (few, many) for text in texts(base, on)}
        tiles = {step.config for on in (few, many) for step in make_plan(base, on).steps}
        assert len(both) == len(tiles), "the same tiles gave two texts"


def test_the_text_names_no_place_on_this_machine() -> None:
    for base in BASES[::3]:
        for text in texts(base):
            assert str(source.kernel_src()) not in text
            assert not any(line.startswith("#include") for line in text.splitlines())


def test_plans_cover_every_row_and_key() -> None:
    """Blocks times rows is at least what there is, for every length and head dim."""
    for head_dim in (1, 64, 129, 257):
        for length in (0, 1, 63, 64, 65, 256, 257, 5000):
            problem = replace(BASES[0], head_dim=head_dim, head_dim_v=head_dim, seq_q=length, seq_kv=length)
            for direction in ("forward", "backward"):
                plan = make_plan(replace(problem, direction=direction), V4)  # type: ignore[arg-type]
                assert plan.splits >= 1 and all(step.blocks >= 0 for step in plan.steps)
                for step in plan.steps:
                    if step.config.kernel != "backward":
                        rows = step.blocks * step.config.block_m
                        assert rows >= problem.batch * problem.heads_q * length
