"""Threads that share a host kernel's blocks, and their scratch memory.

torch's own threads are taken where they can be had: between two of torch's parallel operations they spin on their cores
for milliseconds, so threads of ours would have to share those cores with them. They are reached through the OpenMP
run-time that torch has brought into the process; kernels contain no OpenMP and need none. Elsewhere, and in a forked
child, where OpenMP's threads are gone, the blocks are shared by Python threads, which spend their time inside kernels,
where the interpreter's lock is released.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["ALIGNMENT", "Scratch", "call", "openmp", "scratch"]

ALIGNMENT = 64


_KEPT_BYTES = 64 << 20  # scratch beyond this is given back after the launch


class Scratch:
    """Memory of a launch."""

    __slots__ = ("address", "buffer", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = (ctypes.c_char * (size + ALIGNMENT))()
        start = ctypes.addressof(self.buffer)
        self.address = start + -start % ALIGNMENT


_own = threading.local()


def scratch(size: int) -> Scratch:
    """At least `size` aligned bytes that serve this thread's launches until it asks again.

    Each launching thread has one buffer, as large as its largest launch asked for: kernels do not live on thread
    stacks, whose size varies between systems, and do not pay for fresh pages at every call.
    """
    found: Scratch | None = getattr(_own, "scratch", None)
    if found is None or found.size < size:
        found = Scratch(size)
        if size <= _KEPT_BYTES:
            _own.scratch = found
    return found


def _find_openmp() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP run-time in this process, if there is one.

    It is the entry point that GCC's compiled code calls; LLVM's and Intel's run-times have it too.
    """
    if sys.platform == "win32":
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


openmp = _find_openmp()

_calls: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
_size = 0
_growing = threading.Lock()


def call(times: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Have `times` helper threads call the function, some time soon; nobody waits for them here."""
    if _size < times:
        _grow(times)
    for _ in range(times):
        _calls.put((function, arguments))


def _grow(to: int) -> None:
    global _size
    with _growing:
        for number in range(_size, to):
            threading.Thread(target=_help, args=(_calls,), name=f"jitattn-{number}", daemon=True).start()
        _size = max(_size, to)


def _help(calls: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    while True:
        function, arguments = calls.get()
        function(*arguments)
        del function, arguments  # what was called, and its buffers, must not outlive the call


def _forget_after_fork() -> None:
    global openmp, _calls, _size, _growing
    openmp = None
    _calls, _size, _growing = SimpleQueue(), 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
