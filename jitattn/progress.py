"""What is said on stderr while kernels compile: always before the wait begins, never silently.

One line for each kernel in a log file; one bar, counting kernels, in a terminal or notebook when several compile.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from . import settings

__all__ = ["compiling"]

_lock = threading.Lock()
_bar = None
_running = 0


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Announce one compile, and in debug logging say how long it took."""
    log = settings.current().log
    if log == "quiet":
        yield
        return
    start = time.perf_counter()
    _begin(what)
    try:
        yield
    finally:
        _end(what, time.perf_counter() - start if log == "debug" else None)


def _begin(what: str) -> None:
    global _bar, _running
    with _lock:
        _running += 1
        if _running == 1 or not _interactive():
            print(f"jitattn: compiling {what} ...", file=sys.stderr, flush=True)
            return
        if _bar is None:
            from tqdm.auto import tqdm

            _bar = tqdm(total=1, desc="jitattn: compiling", unit="kernel", leave=False, file=sys.stderr)
        _bar.total += 1
        _bar.set_postfix_str(what)


def _end(what: str, seconds: float | None) -> None:
    global _bar, _running
    with _lock:
        _running -= 1
        if _bar is not None:
            _bar.update()
            if _running == 0:
                _bar.close()
                _bar = None
        if seconds is not None:
            print(f"jitattn: compiled {what} in {seconds:.2f} s", file=sys.stderr, flush=True)


def _interactive() -> bool:
    return sys.stderr.isatty() or "ipykernel" in sys.modules
