"""Where kernels are kept between calls and between runs: process memory, then one SQLite file on disk.

Nothing here is needed for a right answer. An entry proves itself when it is read, and a bad one counts as
missing. A lock only saves a second compile of the same kernel and dies with its owner. A disk that cannot
be used costs a warning, after which kernels live in memory. diskcache and the folder come into being at
first use.

One database transaction publishes an entry whole, and every value lies inside the database: no row of
ours names a file. The connection is opened for each operation (0.3 ms, paid once per kernel and process),
so none crosses a fork, outlives its folder or gathers in threads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from .. import settings
from ..artifact import FORMAT, Artifact, is_key
from ..errors import Damaged, StoreWarning
from .database import (
    DATABASE,
    SCRATCH,
    Entry,
    Pruned,
    Verified,
    attempt,
    create_database,
    evict,
    is_broken,
    is_locked,
    is_recent,
    is_writable,
    keys,
    list_entries,
    open_database,
    prune,
    size_of,
    verify,
)
from .locks import sole_compiler

__all__ = ["DATABASE", "Counters", "Entry", "Pruned", "Store", "StoreInfo", "Verified", "default"]

Origin = Literal["memory", "disk", "compiled"]
T = TypeVar("T")

SET_ASIDE = "damaged.db"
SCRATCH_SECONDS = 3600.0  # after which a folder of a database in the making has lost its maker
REST_SECONDS = 30.0  # how long a failing disk is left alone

log = logging.getLogger("jitattn.store")


@dataclass
class Counters:
    """What happened since the store was made. Every request ends as a hit or as a miss."""

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    damaged: int = 0
    write_failures: int = 0
    evictions: int = 0
    waits: int = 0


@dataclass(frozen=True)
class StoreInfo:
    """A store at a glance. ``trouble`` is the last reason why the disk could not be used, if any."""

    directory: Path
    entries: int
    size: int
    max_bytes: int
    counters: Counters
    trouble: str | None


# Held around every use of SQLite and across every fork, so that no child starts inside one.
_disk_lock = threading.RLock()
_stores: weakref.WeakSet[Store] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _disk_lock
    _disk_lock = threading.RLock()
    for store in list(_stores):
        store._forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _disk_lock.acquire(),
        after_in_parent=lambda: _disk_lock.release(),
        after_in_child=_after_fork_in_child,
    )


class Store:
    """Artifacts by key, in memory and in ``directory``, safe for any number of threads and processes.

    ``max_bytes`` bounds the disk; memory keeps what the process has used, as its loaded kernels do anyway.
    ``lock_wait`` bounds, in seconds, the wait for another process that compiles the same kernel.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int = 1 << 30,
        *,
        lock_wait: float = 60.0,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self.lock_wait = lock_wait
        self._memory: dict[str, Artifact] = {}
        self._counters = Counters()
        self._trouble: str | None = None
        self._resting_until = {"reading": 0.0, "writing": 0.0}
        self._forget_threads()
        _stores.add(self)

    def get(self, key: str) -> Artifact | None:
        """The artifact called ``key``, None if it is not kept."""
        artifact = self._memory.get(key)
        if artifact is not None:
            self._count("memory_hits")
        else:
            artifact = self._read(key)
            self._count("misses" if artifact is None else "disk_hits")
        return artifact

    def put(self, artifact: Artifact) -> None:
        """Keep ``artifact``; if the disk fails, in memory only."""
        self._memory[artifact.key] = artifact
        data = artifact.to_bytes()
        if len(data) > self.max_bytes:
            self._count("write_failures")
            return self._warn(f"a kernel of {len(data)} bytes, the bound is {self.max_bytes}")
        if not self._on_disk(lambda database: self._save(database, artifact.key, data), False, writing=True):
            self._count("write_failures")

    def get_or_build(self, key: str, build: Callable[[], Artifact]) -> tuple[Artifact, Origin]:
        """The artifact called ``key``, built if it is not kept, and where it came from.

        Of the threads that ask at once one works; the others wait and get its artifact from memory, or its
        error, after which the next request builds again. Of the processes that ask at once one builds, as
        a rule.
        """
        while True:
            artifact = self._memory.get(key)
            if artifact is not None:
                self._count("memory_hits")
                return artifact, "memory"
            mine: Future[None] = Future()
            flight = self._flights.setdefault(key, mine)
            if flight is mine:
                return self._lead(key, build, mine)
            self._count("waits")
            # A leader interrupted by Ctrl-C cancels its flight: that was not the waiters' interrupt.
            with contextlib.suppress(CancelledError):
                flight.result()

    def ls(self) -> list[Entry]:
        """The entries on disk, the most recently used first."""
        return self._on_disk(list_entries, [])

    def verify(self) -> Verified:
        """Check every entry on disk and remove what is damaged or was not written by jitattn."""
        if not self._exists():
            return Verified(0, ())
        with _disk_lock:
            if self._set_aside_if_broken():
                return Verified(0, (DATABASE,))
        result = self._on_disk(verify, Verified(0, ()), writing=True)
        self._count("damaged", len(result.removed))
        return result

    def prune(
        self,
        max_bytes: int | None = None,
        unused_for: float | None = None,
        everything: bool = False,
    ) -> Pruned:
        """Shrink the disk to ``max_bytes`` (default: the store's bound), the least recently used going first.

        ``unused_for``: also drop what was last used more than so many seconds ago. ``everything``: empty it.
        """
        self._sweep()
        if not self._exists():
            return Pruned(0, 0)
        limit = self.max_bytes if max_bytes is None else max_bytes
        before = None if unused_for is None else time.time() - unused_for
        action = functools.partial(prune, limit=limit, before=before, everything=everything)
        return self._on_disk(action, Pruned(0, 0), writing=True)

    def info(self) -> StoreInfo:
        """Size, number of entries and counters; makes nothing on disk."""
        entries, size = self._on_disk(lambda database: (len(keys(database)), size_of(database)), (0, 0))
        return StoreInfo(self.directory, entries, size, self.max_bytes, self.counters(), self._trouble)

    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def close(self) -> None:
        """Let go of what is in memory. The store may be used again."""
        self._memory.clear()

    def _exists(self) -> bool:
        return (self.directory / DATABASE).exists()

    def _sweep(self) -> None:
        """Remove what a broken database and a killed process left behind."""
        with contextlib.suppress(OSError):
            (self.directory / SET_ASIDE).unlink(missing_ok=True)
            for scratch in self.directory.glob(f"{SCRATCH}*"):
                if time.time() - scratch.stat().st_mtime > SCRATCH_SECONDS:
                    shutil.rmtree(scratch, ignore_errors=True)

    def _forget_threads(self) -> None:
        """Start without other threads: in a forked child they do not exist, nor will they ever unlock."""
        self._lock = threading.Lock()
        self._flights: dict[str, Future[None]] = {}

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            setattr(self._counters, name, getattr(self._counters, name) + by)

    def _lead(self, key: str, build: Callable[[], Artifact], flight: Future[None]) -> tuple[Artifact, Origin]:
        """Find or build for all threads that wait on ``flight``."""
        try:
            found = self._find_or_build(key, build)
        except BaseException as error:
            self._flights.pop(key, None)
            if isinstance(error, Exception):
                flight.set_exception(error)
            else:
                flight.cancel()
            raise
        self._flights.pop(key, None)
        flight.set_result(None)
        return found

    def _find_or_build(self, key: str, build: Callable[[], Artifact]) -> tuple[Artifact, Origin]:
        artifact = self._memory.get(key)
        if artifact is not None:  # another leader has landed since the caller looked
            self._count("memory_hits")
            return artifact, "memory"
        artifact = self._read(key)
        if artifact is None:
            with self._sole_compiler(key):
                # Whoever held the lock before, while this one waited or just before, has written it.
                artifact = self._read(key)
                if artifact is None:
                    return self._build(key, build), "compiled"
        self._count("disk_hits")
        return artifact, "disk"

    def _build(self, key: str, build: Callable[[], Artifact]) -> Artifact:
        self._count("misses")
        artifact = build()
        if artifact.key != key:
            raise ValueError(f"asked for {key}, built {artifact.key}")
        self.put(artifact)
        return artifact

    def _sole_compiler(self, key: str) -> contextlib.AbstractContextManager[None]:
        # Where nothing can be published, waiting for another process only puts compiles in a row.
        if not self._on_disk(is_writable, False, writing=True):
            return contextlib.nullcontext()
        name = f"{os.path.realpath(self.directory)}\0{key}"
        return sole_compiler(name, self.lock_wait, self._note_wait)

    def _note_wait(self) -> None:
        self._count("waits")
        log.info("another process compiles this kernel; waiting for it, for %g s at most", self.lock_wait)

    def _read(self, key: str) -> Artifact | None:
        if not is_key(key):
            raise ValueError(f"not a key: {key!r}")
        artifact = self._on_disk(lambda database: self._load(database, key), None)
        if artifact is not None:
            self._memory[key] = artifact
        return artifact

    def _load(self, database: Any, key: str) -> Artifact | None:
        artifact, data, last_used = None, None, None
        try:
            data, last_used = database.get(key, tag=True)
            if data is not None:
                artifact = Artifact.from_bytes(data, key)
        except Damaged as damage:
            self._count("damaged")
            log.warning("removing a damaged entry from %s: %s", self.directory, damage)
            attempt(lambda: database.delete(key))
        if artifact is not None and not is_recent(last_used):
            attempt(lambda: database.set(key, data, tag=time.time()))
        return artifact

    def _save(self, database: Any, key: str, data: bytes) -> bool:
        database.set(key, data, tag=time.time())
        self._count("evictions", evict(database, self.max_bytes))
        return True

    def _on_disk(self, action: Callable[[Any], T], otherwise: T, writing: bool = False) -> T:
        """``action`` on the open database; ``otherwise`` where there is none or the disk fails.

        ``writing`` makes the folder and the database if they are missing. A broken database is set aside,
        and the action tried once more without it. After another failure the disk is left alone for a while,
        or only no longer written to if reading still works.
        """
        kind = "writing" if writing else "reading"
        with _disk_lock:
            if time.monotonic() < self._resting_until[kind]:
                return otherwise
            try:
                try:
                    return self._attempt(action, otherwise, writing)
                except Exception as error:
                    if is_locked(error) or not self._set_aside_if_broken():
                        raise
                    return self._attempt(action, otherwise, writing)
            except Exception as error:  # whatever a disk, a database or its library can do wrong
                for resting in {kind, "writing"}:
                    self._resting_until[resting] = time.monotonic() + REST_SECONDS
                reason = f"{kind} fails with {type(error).__name__}: {error}"
        self._warn(reason)
        return otherwise

    def _attempt(self, action: Callable[[Any], T], otherwise: T, writing: bool) -> T:
        if not self._exists():
            if not writing:
                return otherwise
            create_database(self.directory)
        with open_database(self.directory) as database:
            return action(database)

    def _set_aside_if_broken(self) -> bool:
        """Whether another try makes sense: the database was broken or is gone, and is now out of the way."""
        path = self.directory / DATABASE
        try:
            examined = path.stat()
            if not is_broken(path):
                return False
            log.warning("the database %s is broken; it is set aside and made anew", path)
            # A journal left behind would be played back into the next database.
            Path(f"{path}-journal").unlink(missing_ok=True)
            if os.path.samestat(examined, path.stat()):
                os.replace(path, self.directory / SET_ASIDE)
        except FileNotFoundError:  # another process was first
            return True
        return True

    def _warn(self, reason: str) -> None:
        first, self._trouble = self._trouble is None, reason
        if first:
            message = f"the cache {self.directory} cannot be used ({reason}); kernels stay in memory only"
            warnings.warn(message, StoreWarning, stacklevel=2)


def default() -> Store:
    """The store that the settings of this moment describe; equal settings give the same object."""
    chosen = settings.current()
    # The format's number is in the path, so that two versions of jitattn can share a cache folder.
    return _store(chosen.cache_dir / f"kernels-{FORMAT}", chosen.cache_bytes, chosen.cache_wait)


@functools.cache
def _store(directory: Path, max_bytes: int, lock_wait: float) -> Store:
    return Store(directory, max_bytes, lock_wait=lock_wait)
