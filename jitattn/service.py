"""The compilation service's public face: compile ahead, and explain what a call would run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import api, launch, pipeline, settings, target
from .pipeline import Kernel, Ready
from .problem import Direction, Problem

__all__ = ["Explanation", "WarmupReport", "explain", "warmup"]


@dataclass(frozen=True)
class Explanation:
    """What a call runs. ``str()`` of it is a report."""

    problem: Problem
    target: target.Target
    ready: Ready

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Each with its `config`, `artifact` (source, binary, meta) and `origin`, in launch order."""
        return self.ready.kernels

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.target}"]
        for kernel, step in zip(self.kernels, self.ready.plan.steps, strict=True):
            meta = kernel.artifact.meta
            lines += [
                f"  {kernel.config}: {step.blocks} blocks",
                f"    key        {kernel.artifact.key}",
                f"    binary     {len(kernel.artifact.binary)} bytes, "
                + (f"compiled now in {meta['compile_seconds']:.2f} s" if kernel.origin == "compiled" else
                   f"from the cache ({kernel.origin}), {meta['compile_seconds']:.2f} s when it was compiled"),
                f"    toolchain  {meta['toolchain'].partition(';')[0]}",
                *(f"    {name:<10} {value}" for name, value in meta["resources"].items()),
            ]  # fmt: skip
        lines.append(f"  kept in {settings.current().cache_dir}; `jitattn show` prints the source")
        return "\n".join(lines)


def explain(q: Tensor, k: Tensor, v: Tensor, *, direction: Direction = "forward", **options: Any) -> Explanation:
    """The plan and the kernels of ``jitattn.attention(q, k, v, **options)``, compiled if they were not yet.

    :param direction: "forward", or "backward" for the kernels that compute its gradients
    :raises: what the call itself would raise
    """
    scale, causal = _normalised(q, k, v, options)
    problem, on = launch.describe(direction, q, k, v, scale, causal), target.detect(q.device.type)
    return Explanation(problem, on, pipeline.resolve(problem, on))


@dataclass(frozen=True)
class WarmupReport:
    """How many kernels are ready now, and how many of them had to be compiled."""

    kernels: int
    compiled: int
    compile_seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels ready, {self.compiled} of them compiled ({self.compile_seconds:.1f} s of work)"


def warmup(*problems_or_calls: Any, target_name: str = "host") -> WarmupReport:
    """Compile now what later calls will need, several kernels side by side.

    Each argument is a Problem, or a call's arguments: a (q, k, v) tuple or a (q, k, v, options) tuple. Tensors on the
    "meta" device or fake ones will do: only shapes, dtypes and flags count. A call whose tensors require gradients
    warms its backward up too.

    :raises: what the calls themselves would raise
    """
    on = target.parse(target_name)
    problems = [problem for each in problems_or_calls for problem in _problems(each)]
    ready = pipeline.resolve_all(problems, on)
    kernels = {kernel.artifact.key: kernel for each in ready for kernel in each.kernels}
    compiled = [kernel.artifact for kernel in kernels.values() if kernel.origin == "compiled"]
    return WarmupReport(len(kernels), len(compiled), sum(a.meta["compile_seconds"] for a in compiled))


def _problems(each: Any) -> Iterable[Problem]:
    if isinstance(each, Problem):
        yield each
        return
    q, k, v, *rest = each
    scale, causal = _normalised(q, k, v, rest[0] if rest else {})
    yield launch.describe("forward", q, k, v, scale, causal)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        yield launch.describe("backward", q, k, v, scale, causal)


def _normalised(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[float | None, str]:
    """A call's scale and causal alignment, checked as the call would check them."""
    given = inspect.signature(api.attention).bind(q, k, v, **options)
    given.apply_defaults()
    api.refuse(**given.arguments)
    launch.check(q, k, v)
    return given.arguments["scale"], api.align(given.arguments["causal"], q, k)
