"""One compiler per kernel and node: an advisory lock that only saves work and dies with its owner."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR

log = logging.getLogger("jitattn.store")

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        # A record lock, not flock: it belongs to the process, so a forked child that outlives its killed
        # parent does not go on holding it.
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _lock_folder() -> Path:
    """This user's folder of locks, in the temporary folder: locks on a network file system promise nothing.

    :raises OSError: it cannot be made, or is somebody else's to write.
    """
    if sys.platform == "win32":  # where the temporary folder is the user's own
        folder = Path(tempfile.gettempdir()) / "jitattn-locks"
        folder.mkdir(exist_ok=True)
        return folder
    folder = Path(tempfile.gettempdir()) / f"jitattn-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is not a private folder")
    return folder


def _acquire(path: Path, wait: float, on_wait: Callable[[], None]) -> int | None:
    """A descriptor that holds the lock, or None after ``wait`` seconds. Polls: the dead send no message."""
    deadline = time.monotonic() + wait
    pause = 0.0
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        holds = False
        try:
            holds = _try_lock(descriptor) and _is_at(path, descriptor)
        finally:
            if not holds:
                os.close(descriptor)
        if holds:
            return descriptor
        if time.monotonic() >= deadline:
            return None
        if not pause:
            on_wait()
        pause = min(max(1.5 * pause, 0.002), 0.05)
        time.sleep(pause)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still names the open file: an owner unlinks it before letting go."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def sole_compiler(name: str, wait: float, on_wait: Callable[[], None]) -> Iterator[None]:
    """As a rule, one process of this node is inside for one ``name``. No fault of the lock stops anybody."""
    path = descriptor = None
    try:
        path = _lock_folder() / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock"
        descriptor = _acquire(path, wait, on_wait)
        if descriptor is None:
            log.warning("another process has compiled this kernel for %g s; compiling it here too", wait)
    except OSError as error:
        log.debug("compiling without a lock: %s", error)
    try:
        yield
    finally:
        if path is not None and descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)
