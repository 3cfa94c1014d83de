"""The compilation service's public face: compile ahead, and explain what a call would run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
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
    problem, on = _problem(direction, q, k, v, options), launch.target_of(q.device)
    return Explanation(problem, on, pipeline.resolve(problem, on))


@dataclass(frozen=True)
class WarmupReport:
    """How many kernels are ready now, and how many of them had to be compiled."""

    kernels: int
    compiled: int
    compile_seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels ready, {self.compiled} of them compiled ({self.compile_seconds:.1f} s of work)"


def warmup(*problems_or_calls: Any, target_name: str | None = None) -> WarmupReport:
    """Compile now what later calls will need, several kernels side by side, and load it onto the GPU that is meant.

    Each argument is a Problem, or a call's arguments: a (q, k, v) tuple or a (q, k, v, options) tuple. Tensors on the
    "meta" device or fake ones will do: only shapes, dtypes, strides and flags count. A call whose tensors require
    gradients warms its backward up too.

    :param target_name: what to compile for: a device of this machine ("cpu", "cuda", "cuda:1"), or any target ("host",
        "sm_90"), which compiles and loads nothing. By default it is the device of a call's tensors, and the cpu for a
        Problem and for tensors on "meta".
    :raises: what the calls themselves would raise
    """
    kernels: dict[str, Kernel] = {}
    for (on, device), problems in _by_place(problems_or_calls, target_name).items():
        for ready in pipeline.resolve_all(problems, on):
            kernels |= {kernel.artifact.key: kernel for kernel in ready.kernels}
            if device is not None:
                for kernel in ready.kernels:
                    kernel.loaded.load(device)
    compiled = [kernel.artifact for kernel in kernels.values() if kernel.origin == "compiled"]
    return WarmupReport(len(kernels), len(compiled), sum(a.meta["compile_seconds"] for a in compiled))


_Place = tuple[target.Target, int | None]  # what is compiled for, and the device that it is loaded onto


def _by_place(problems_or_calls: Iterable[Any], target_name: str | None) -> dict[_Place, list[Problem]]:
    """The problems that are posed, by where they will be met."""
    found: dict[_Place, list[Problem]] = {}
    for each in problems_or_calls:
        problems, device = ([each], "cpu") if isinstance(each, Problem) else _posed(*each)
        found.setdefault(_place(target_name or device), []).extend(problems)
    return found


def _place(name: str) -> _Place:
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        device = torch.device(name)
        return launch.target_of(device), launch.device_index(device)
    return target.parse(name), None


def _posed(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] | None = None) -> tuple[list[Problem], str]:
    trains = q.requires_grad or k.requires_grad or v.requires_grad
    directions: tuple[Direction, ...] = ("forward", "backward") if trains else ("forward",)
    problems = [_problem(direction, q, k, v, options or {}) for direction in directions]
    return problems, "cpu" if q.device.type == "meta" else str(q.device)


def _problem(direction: Direction, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Problem:
    """What a call asks for, checked as the call would check it."""
    given = inspect.signature(api.attention).bind(q, k, v, **options)
    given.apply_defaults()
    api.refuse(**given.arguments)
    launch.check(q, k, v)
    scale, deterministic = given.arguments["scale"], given.arguments["deterministic"]
    causal = api.align(given.arguments["causal"], q, k)
    return launch.describe(direction, q, k, v, scale, causal, deterministic, launch.addresses(q, k, v))
