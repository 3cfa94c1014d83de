"""Whole attention calls on the emulator: the project's plan for a CUDA target, launched on tensors of the cpu.

    from tests import oracle
    from tests.emulator.attention import Emulated

    oracle.verify(case, Emulated("sm_80"))                                # out, lse, dq, dk, dv
    out = Emulated("sm_80", seed=3, race_check=True)(q, k, v, causal="top_left")

`Emulated(change=f)` runs the kernel of f(config) in the place of each step's KernelConfig, to try other tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jitattn import launch, params, source
from jitattn.config import KernelConfig
from jitattn.plan import Plan, make_plan
from jitattn.problem import Problem
from jitattn.target import Target, parse

from . import assemble, region, run
from .boxes import tensor_map

__all__ = ["Emulated"]


class Emulated:
    """Called like jitattn.attention, with autograd.

    :param units: multiprocessors of the GPU that is planned for, if not the target's usual number
    :param deterministic: see Problem
    """

    def __init__(
        self,
        target: str | Target = "sm_80",
        *,
        seed: int = 0,
        race_check: bool = False,
        deterministic: bool = False,
        units: int | None = None,
        change: Callable[[KernelConfig], KernelConfig] | None = None,
    ) -> None:
        target = parse(target) if isinstance(target, str) else target
        self.target = target if units is None else dataclasses.replace(target, units=units)
        self.seed = seed
        self.race_check = race_check
        self.deterministic = deterministic
        self.change = change
        self.ran: list[KernelConfig] = []
        """Of all calls, in order."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: Any = False,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        out, lse = _Function.apply(q, k, v, scale, causal or "none", self)
        return (out, lse) if return_lse else out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str) -> tuple[Tensor, Tensor]:
        """The output and the LSE."""
        problem = self.problem("forward", {"q": q, "k": k, "v": v}, scale, causal)
        out = _poison(q.dtype, *q.shape[:3], v.shape[3])
        lse = _poison(torch.float32, *q.shape[:3])
        self._launch(problem, params.FORWARD, {"q": q, "k": k, "v": v}, {"out": out, "lse": lse})
        return out, lse

    def backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        scale: float | None, causal: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of q, k and v."""
        read = {"q": q, "k": k, "v": v, "out": out, "grad_out": grad_out}
        problem = self.problem("backward", read, scale, causal)
        grads = {f"grad_{name}": _poison(q.dtype, *x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
        more = {"lse": lse} | ({} if grad_lse is None else {"grad_lse": grad_lse.contiguous()})
        self._launch(problem, params.BACKWARD, read | more, grads)
        return grads["grad_q"], grads["grad_k"], grads["grad_v"]

    def problem(self, direction: Any, read: dict[str, Tensor], scale: float | None, causal: str) -> Problem:
        """What a GPU would be asked; `read` are the tensors whose alignment matters."""
        q, k, v, *others = read.values()
        problem = launch.describe(direction, q, k, v, scale, causal)
        alignment = launch._alignment(launch.addresses(*read.values()), q, k, v, *others)
        repeats = launch._repeats(*read.values())
        return dataclasses.replace(problem, alignment=alignment, repeats=repeats, deterministic=self.deterministic)

    def plan(self, problem: Problem) -> Plan:
        """The plan of a problem, its kernels changed as was asked for."""
        plan = make_plan(problem, self.target)
        if self.change is None:
            return plan
        steps = tuple(dataclasses.replace(step, config=self.change(step.config)) for step in plan.steps)
        return dataclasses.replace(plan, steps=steps)

    def _launch(
        self, problem: Problem, table: params.Table, read: dict[str, Tensor], written: dict[str, Tensor]
    ) -> None:
        plan = self.plan(problem)
        if plan.workspace_bytes:
            written = written | {"workspace": _poison(torch.float32, plan.workspace_bytes // 4)}
        tensors = read | written
        addresses = [tensors[name].data_ptr() if name in tensors else 0 for name in table.pointers]
        strides = {name: x.stride() for name, x in tensors.items() if x.dim() == 4}
        values = launch._values(problem, strides) | {"splits": plan.splits}
        pointers = table.pack_pointers().pack(*addresses)
        regions = [region(name, x) for name, x in read.items()]
        regions += [region(name, x, writable=True) for name, x in written.items()]
        for step in plan.steps:
            self.ran.append(step.config)
            text = assemble(step.config, self.target)
            of_kernel = source.table_of(step.config.kernel)
            parameters = bytearray(of_kernel.parameters(values))
            parameters[: len(pointers)] = pointers
            for each in of_kernel.tensor_maps(step.config, values):
                written_map = tensor_map(each, addresses[each.pointer])
                parameters[each.offset : each.offset + len(written_map)] = written_map
            run(text, bytes(parameters), step.blocks, regions, seed=self.seed, race_check=self.race_check)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: str, by: Emulated) -> Any:
        out, lse = by.forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = scale, causal, by
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale, causal, by = ctx.options
        return (*by.backward(*grads, *ctx.saved_tensors, scale, causal), None, None, None)


def _poison(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)
