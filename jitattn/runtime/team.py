"""Threads that help with host kernels, and each thread's scratch memory.

They are Python threads that spend their time inside kernels, where the interpreter's lock is released, or blocked in
a queue. There is no OpenMP run-time, so nothing that another library does with one can disturb or be disturbed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["call", "scratch"]

_ALIGNMENT = 64


class _Scratch(threading.local):
    """One buffer a thread, as large as its largest kernel asked for: kernels do not live on thread stacks, whose
    size varies between systems, and do not pay for fresh pages at every call."""

    size = 0
    address = 0
    buffer: Any = None


_scratch = _Scratch()


def scratch(size: int) -> int:
    """The address of at least `size` aligned bytes that are this thread's own until it asks again."""
    if _scratch.size < size:
        _scratch.buffer = (ctypes.c_char * (size + _ALIGNMENT))()
        start = ctypes.addressof(_scratch.buffer)
        _scratch.address = start + -start % _ALIGNMENT
        _scratch.size = size
    return _scratch.address


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
    """A forked child has none of the helper threads."""
    global _calls, _size, _growing
    _calls, _size, _growing = SimpleQueue(), 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
