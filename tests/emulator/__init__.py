"""CUDA kernels on a processor: the unmodified kernel text, with every instruction checked.

A kernel's text names its instructions by the functions of kernel_src/arch/cuda/ptx.h. Here they are functions of C++
(device/ptx.h) on an engine (engine/) that runs the threads of a block as fibers in a random order and checks what they
do. A text is assembled for the emulator by putting its folder first:

    from tests import emulator

    text = emulator.assemble(config, jitattn.target.parse("sm_80"))      # config: a KernelConfig for that target
    emulator.run(text, params_bytes, blocks, [emulator.region("q", q), emulator.region("out", out, writable=True)],
                 seed=1, race_check=True)

or written by hand with `#include "launch.h"` (tests/test_emulator.py has many). For whole plans on tensors see
tests/emulator/attention.py. Kernels for Hopper's copy engine, warpgroup products and clusters of blocks
(kernel_src/arch/sm90) run as well; what a driver would write into their tensor maps comes from boxes.py.

An error of a kernel raises EmulatorError: accesses that are misaligned, or outside of shared memory and the regions (of
plain loads and stores too); warps that diverge at a collective operation; deadlocks; faults of the processor; with
`race_check` accesses to shared memory that no barrier orders, at twice the time. What shared memory has before it is
written, and where a copy is under way, is NaN, and so are the sums of products that were not waited for.

A block of a cluster may not end before all is over that others do with its shared memory. sync_cluster waits for every
thread, also for those that have ended, which a GPU does not wait for.

Not emulated: time, caches, other blocks at the same time (clusters run one after the other), bank conflicts, registers.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

from jitattn import source
from jitattn.config import KernelConfig
from jitattn.target import Target

from . import build
from .build import BuildError

__all__ = ["ONLY_HERE", "BuildError", "EmulatorError", "Region", "assemble", "on_emulator", "region", "run", "shape"]

ONLY_HERE = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the emulator is written for Linux")
"""For tests that use it."""

_MESSAGE_BYTES, _CALLS = 4096, 32


class EmulatorError(Exception):
    """What a kernel did wrong, and where."""


@dataclass(frozen=True)
class Region:
    """Global memory that a kernel may touch: addresses from `begin` up to `end`."""

    name: str
    begin: int
    end: int
    writable: bool = False


def region(name: str, tensor: Tensor, *, writable: bool = False) -> Region:
    """From a tensor's first element to its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    bytes_ = elements * tensor.element_size() if tensor.numel() else 0
    return Region(name, tensor.data_ptr(), tensor.data_ptr() + bytes_, writable)


def on_emulator(target: Target) -> Target:
    """A CUDA target whose kernels are assembled for the emulator."""
    return replace(target, overlay=(build.DEVICE.as_posix(), *target.overlay))


def assemble(config: KernelConfig, target: Target) -> str:
    """The text of a CUDA target's kernel for the emulator."""
    return source.assemble(config, on_emulator(target), "emulator").text


def shape(text: str) -> tuple[int, int]:
    """Threads of a block and bytes of shared memory."""
    return _Kernel.of(text).shape


def run(
    text: str,
    parameters: bytes,
    blocks: int,
    regions: Sequence[Region] = (),
    *,
    threads: int | None = None,
    shared_bytes: int | None = None,
    seed: int = 0,
    race_check: bool = False,
    flags: Sequence[str] = (),
) -> None:
    """Launch a kernel and wait for its end.

    :param parameters: the bytes of its Params
    :param blocks: whole clusters of them
    :param threads: of a block, if not what the kernel says; likewise `shared_bytes`
    :param seed: of the order in which blocks, warps, lanes and copies take their turns
    :param flags: for the compiler
    :raises EmulatorError: the kernel did something wrong. Memory is left as it was then.
    :raises BuildError: the compiler refused the text.
    """
    _Kernel.of(text, flags).launch(parameters, blocks, regions, threads, shared_bytes, seed, race_check)


class _CRegion(ctypes.Structure):
    """engine/block.h's Region."""

    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int64),
    ]


class _CLaunch(ctypes.Structure):
    """engine/block.h's Launch."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_char_p),
        ("params_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("cluster", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64),
        ("regions", ctypes.POINTER(_CRegion)),
        ("region_count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("race_check", ctypes.c_int64),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_int64),
        ("calls", ctypes.POINTER(ctypes.c_uint64)),
        ("call_count", ctypes.c_int64),
    ]


class _Kernel:
    """A library that is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._lock = threading.Lock()
        threads, shared_bytes = (ctypes.c_int * 2).in_dll(self._library, "jitattn_shape")
        self.shape = threads, shared_bytes
        try:
            self.cluster = ctypes.c_int.in_dll(self._library, "jitattn_cluster").value
        except ValueError:  # a text with an entry of its own
            self.cluster = 1

    @staticmethod
    def of(text: str, flags: Sequence[str] = ()) -> _Kernel:
        return _loaded(build.library(text, flags))

    def launch(
        self, parameters: bytes, blocks: int, regions: Sequence[Region], threads: int | None,
        shared_bytes: int | None, seed: int, race_check: bool,
    ) -> None:  # fmt: skip
        count = self.shape[0] if threads is None else threads
        if not 0 < count <= 1024 or count % 32:
            raise ValueError(f"a block has whole warps and at most 1024 threads, not {count}")
        if not 0 < self.cluster <= 8 or blocks % self.cluster:
            raise ValueError(f"{blocks} blocks are to be clusters of {self.cluster}: of 1 to 8 all are whole")
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        calls = (ctypes.c_uint64 * _CALLS)()
        launch = _CLaunch(
            kernel=ctypes.cast(self._library.jitattn_kernel, ctypes.c_void_p),
            params=parameters,
            params_bytes=len(parameters),
            blocks=blocks,
            cluster=self.cluster,
            threads=count,
            shared_bytes=self.shape[1] if shared_bytes is None else shared_bytes,
            regions=(_CRegion * len(regions))(
                *(_CRegion(r.begin, r.end, r.name.encode(), r.writable) for r in regions)
            ),
            region_count=len(regions),
            seed=seed,
            race_check=race_check,
            message=ctypes.cast(message, ctypes.c_char_p),
            message_bytes=_MESSAGE_BYTES,
            calls=calls,
            call_count=_CALLS,
        )
        with self._lock:
            failed = self._library.emulator_run(ctypes.byref(launch))
        if failed:
            raise EmulatorError("\n    at ".join([message.value.decode(), *self._call_site(calls)]))

    def _call_site(self, calls: ctypes.Array[ctypes.c_uint64]) -> list[str]:
        offsets = [at for at in calls if at]
        return build.call_site(self._path, offsets) if offsets else []


@functools.cache
def _loaded(path: Path) -> _Kernel:
    return _Kernel(path)
