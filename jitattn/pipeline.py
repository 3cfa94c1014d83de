"""The one way from a problem to something that can be launched:

    plan -> source -> (memory | disk | compiler) -> artifact -> loaded kernel

Kernels stay loaded for the life of the process. A kernel that failed to compile is remembered and fails again at once.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from . import params, progress, settings, source, store, toolchain
from .artifact import Artifact
from .config import KernelConfig
from .errors import CompileError
from .plan import Plan, Step, make_plan
from .problem import Problem
from .target import Target, cores

__all__ = ["Kernel", "Launch", "Ready", "is_ready", "prefetch", "resolve", "resolve_all", "stats"]


class Launch(Protocol):
    """A kernel with everything but its pointers."""

    workspace_bytes: int
    """What the `workspace` pointer must point to for this kernel, beyond the plan's own."""

    def __call__(self, pointers: bytes, where: Callable[[], int]) -> None:
        """Run it; later work on the tensors sees the result. `where` is asked for the number of the host's threads that
        may take part, or for the GPU's stream that it is put on."""
        ...


class Loaded(Protocol):
    """What a runtime makes of an artifact."""

    def is_on(self, device: int) -> bool:
        """Whether it can be launched on a device of the target's kind, by its index, with nothing left to load."""
        ...

    def load(self, device: int) -> None:
        """Bring it onto the device, unless it is there."""
        ...

    def prepare(self, blocks: int, parameters: bytes, device: int, maps: Sequence[params.TensorMap] = ()) -> Launch:
        """A launch of so many blocks there with the parameters of a params.Table, their pointers still null, and its
        tensor maps."""
        ...


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel in this process."""

    config: KernelConfig
    artifact: Artifact
    origin: str
    """Where its binary came from: "memory", "disk" or "compiled"."""
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Ready:
    """A problem whose kernels can be launched, one for each step of the plan."""

    plan: Plan
    kernels: tuple[Kernel, ...]

    def prepare(self, values: Mapping[str, int | float], device: int) -> tuple[Launch, ...]:
        """The launches of the plan's steps, in order. `values` has what is called for by their params.Tables."""
        steps = zip(self.kernels, self.plan.steps, strict=True)
        return tuple(_prepare(kernel, step, values, device) for kernel, step in steps)


def _prepare(kernel: Kernel, step: Step, values: Mapping[str, int | float], device: int) -> Launch:
    table = source.table_of(step.config.kernel)
    maps = table.tensor_maps(step.config, values)
    return kernel.loaded.prepare(step.blocks, table.parameters(values), device, *([maps] if maps else []))


def resolve(problem: Problem, target: Target) -> Ready:
    """The plan of a problem with its kernels, compiled side by side if they have to be.

    :raises CompileError: a compiler refused a kernel.
    :raises ToolchainMissing: there is no compiler for the target; the message says what to install.
    """
    plan = make_plan(problem, target)
    futures = [_future(step.config, target) for step in plan.steps]
    return Ready(plan, tuple(future.result() for future in futures))


def resolve_all(problems: Iterable[Problem], target: Target) -> list[Ready]:
    """Several problems, their kernels compiled side by side."""
    problems = list(problems)
    for problem in problems:
        prefetch(problem, target)
    return [resolve(problem, target) for problem in problems]


def prefetch(problem: Problem, target: Target) -> None:
    """Start what `resolve` would wait for, and return at once."""
    for step in make_plan(problem, target).steps:
        _future(step.config, target)


def is_ready(problem: Problem, target: Target, device: int) -> bool:
    """Whether the problem can be launched there with nothing left to compile or to load."""
    with _lock:
        futures = [_futures.get((step.config, target)) for step in make_plan(problem, target).steps]
    return all(f is not None and f.done() and not f.exception() and f.result().loaded.is_on(device) for f in futures)


def stats() -> dict[str, Any]:
    """Counts of this process: kernels "compiled", "disk_hits", "memory_hits", and "compile_seconds"."""
    with _lock:
        done = [f.result() for f in _futures.values() if f.done() and not f.exception()]
    compiled = [kernel.artifact for kernel in done if kernel.origin == "compiled"]
    return {
        "compiled": len(compiled),
        "disk_hits": sum(kernel.origin == "disk" for kernel in done),
        "memory_hits": sum(kernel.origin == "memory" for kernel in done),
        "compile_seconds": sum(artifact.meta["compile_seconds"] for artifact in compiled),
    }


_lock = threading.Lock()
_futures: dict[tuple[KernelConfig, Target], Future[Kernel]] = {}


def _future(config: KernelConfig, target: Target) -> Future[Kernel]:
    """The kernel, or the work that will make it: one for all who ask, now and later."""
    with _lock:
        future = _futures.get((config, target))
        if future is None or _may_succeed_now(future):
            future = _futures[config, target] = _workers().submit(_make, config, target)
        return future


def _may_succeed_now(failed: Future[Kernel]) -> bool:
    """A compiler that was missing may have been installed since; one that refused a kernel will refuse it again."""
    return (
        failed.done() and isinstance(failed.exception(), Exception) and not isinstance(failed.exception(), CompileError)
    )


@functools.cache
def _workers() -> ThreadPoolExecutor:
    # The work is done by compiler processes, or by a compiler in this one that leaves the interpreter's lock alone.
    return ThreadPoolExecutor(max_workers=max(2, cores()), thread_name_prefix="jitattn-compile")


def _make(config: KernelConfig, target: Target) -> Kernel:
    compiler = toolchain.find(target)
    text = source.assemble(config, target, compiler.identity())
    artifact, origin = store.default().get_or_build(text.digest, lambda: _compile(config, target, text, compiler))
    runtime = importlib.import_module(f".runtime.{target.vendor}", __package__)
    return Kernel(config, artifact, origin, runtime.Loaded(artifact))


def _compile(config: KernelConfig, target: Target, text: source.Source, compiler: toolchain.Toolchain) -> Artifact:
    _warn_of_many_compiles()
    with progress.compiling(f"{config} for {target}"):
        binary = compiler.compile(text.text, text.flags)
    return Artifact.create(
        text.text,
        binary.data,
        target=str(target),
        entry=text.entry,
        toolchain=compiler.identity(),
        flags=text.flags,
        compile_seconds=binary.seconds,
        resources={"binary_bytes": len(binary.data), **binary.resources},
        description=str(config),
    )


def _warn_of_many_compiles() -> None:
    limit = settings.current().compile_limit
    with _lock:
        configs = [config for config, _ in _futures]
    if len(configs) != limit + 1:
        return
    varying = [
        name
        for name in KernelConfig.__dataclass_fields__
        if len({getattr(config, name) for config in configs}) > limit // 4
    ]
    warnings.warn(
        f"more than {limit} kernels in this process (JITATTN_COMPILE_LIMIT); what varies most: "
        f"{', '.join(varying) or 'nothing in particular'}",
        stacklevel=2,
    )


def _forget_after_fork() -> None:
    """A child keeps the loaded kernels, and drops the work and the lock of threads that it does not have."""
    global _lock
    _lock = threading.Lock()
    _workers.cache_clear()
    for key in [key for key, future in _futures.items() if not future.done()]:
        del _futures[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
