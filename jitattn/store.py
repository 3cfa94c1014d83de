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
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal, TypeVar

from . import settings
from .artifact import FORMAT, Artifact, is_key
from .errors import Damaged, StoreWarning

__all__ = ["Counters", "Entry", "Pruned", "Store", "StoreInfo", "Verified", "default"]

Origin = Literal["memory", "disk", "compiled"]
T = TypeVar("T")

DATABASE = "cache.db"  # diskcache's own name for it
SET_ASIDE = "damaged.db"
BUSY_SECONDS = 2.0  # how long one operation waits for another process's transaction
REST_SECONDS = 30.0  # how long a failing disk is left alone
RECENCY_SECONDS = 3600.0  # how exactly "least recently used" is known

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
class Entry:
    """One entry on disk. Times are Unix seconds, sizes bytes; meta is empty if ``damaged``."""

    key: str
    size: int
    last_used: float
    meta: dict[str, Any]
    damaged: bool = False


@dataclass(frozen=True)
class StoreInfo:
    """A store at a glance. ``trouble`` is the last reason why the disk could not be used, if any."""

    directory: Path
    entries: int
    size: int
    max_bytes: int
    counters: Counters
    trouble: str | None


@dataclass(frozen=True)
class Verified:
    """Result of a verification: how many entries are sound and which were found damaged and removed."""

    sound: int
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """Result of pruning: entries removed, bytes freed."""

    removed: int
    freed: int


# ---------------------------------------------------------------- the database


class BytesDisk:
    """What diskcache calls a Disk, allowing one kind of row: a key and bytes, both inside the database.

    It inherits nothing. diskcache's own Disk pickles what it does not know, and opens, reads and deletes
    whatever file a row names, and anybody who can write the database can write a row.
    """

    MODE_RAW = 1

    def put(self, key: object) -> tuple[str, bool]:
        if not is_key(key):
            raise TypeError(f"not a key: {key!r}")
        return str(key), True

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, bytes]:
        if type(value) is not bytes or read:
            raise TypeError("only bytes are stored")
        return 0, self.MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != self.MODE_RAW or filename is not None or type(value) is not bytes or read:
            raise Damaged("the row was not written by jitattn")
        return value

    def remove(self, file_path: object) -> None:
        """Nothing: a row that names a file to delete was not written by jitattn."""


# The rows that BytesDisk writes, as SQL sees them.
_OURS = (
    "raw = 1 AND typeof(key) = 'text' AND length(key) = 64 AND key NOT GLOB '*[^0-9a-f]*'"
    " AND mode = 1 AND filename IS NULL AND typeof(value) = 'blob'"
)

_DATABASE_SETTINGS = {
    # Reading is then free of writes; _load renews an entry's time of storage when it is used.
    "eviction_policy": "least-recently-stored",
    "cull_limit": 0,  # _evict does it, exactly to the bound
    "statistics": 0,
    # A rollback journal needs no shared memory (WAL does, and then a full or shrunk disk is a SIGBUS).
    "sqlite_journal_mode": "truncate",
    "sqlite_mmap_size": 0,
    # A transaction survives SIGKILL without fsync, which takes 7 to 15 ms. A power cut may ruin the database:
    # that is found out, and the database made anew.
    "sqlite_synchronous": 0,
}


@contextlib.contextmanager
def _open_database(folder: Path) -> Iterator[Any]:
    """A diskcache.Cache on ``folder``'s existing database, opened without a single write.

    diskcache's constructor writes every setting back at each open, some thirty transactions; with many
    processes at once that takes tens of milliseconds and now and then fails. Its work was done when the
    database was created, so only its attributes are set here.
    """
    import diskcache

    cache: Any = diskcache.Cache.__new__(diskcache.Cache)
    cache._directory, cache._timeout = str(folder), BUSY_SECONDS
    cache._local, cache._txn_id = threading.local(), None
    cache._disk = BytesDisk()
    for name, value in _DATABASE_SETTINGS.items():
        setattr(cache, name, value)
    try:
        ((cache._page_size,),) = cache._sql("PRAGMA page_size").fetchall()
        yield cache
    finally:
        cache.close()


def _create_database(folder: Path) -> None:
    """Make ``folder`` (mode 0700) and its database, which appears whole or not at all."""
    import diskcache

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
    try:
        diskcache.Cache(str(scratch), **_DATABASE_SETTINGS).close()
        _publish(scratch / DATABASE, folder / DATABASE)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(new: Path, path: Path) -> None:
    """Give the file ``new`` the name ``path``, unless another process has taken that name already."""
    try:
        os.link(new, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not path.exists():
            os.replace(new, path)


def _is_broken(path: Path) -> bool:
    """Whether the database itself is at fault; no if that cannot be told (it is locked, may not be read)."""
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            columns = "key, raw, store_time, expire_time, access_time, tag, size, mode, filename, value"
            connection.execute(f"SELECT {columns} FROM Cache LIMIT 1").fetchall()
            sums = connection.execute("SELECT value FROM Settings WHERE key IN ('count', 'size')").fetchall()
            sound = connection.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)]
            return not (sound and len(sums) == 2 and all(isinstance(value, int) for (value,) in sums))
    except sqlite3.OperationalError as error:
        return "no such" in str(error)
    except sqlite3.DatabaseError:
        return True


# ---------------------------------------------------------------- one compiler per kernel and node

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
        with contextlib.suppress(FileNotFoundError):
            # An owner unlinks its file before letting go, so a lock on an unlinked file is nobody's lock.
            if _try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline:
            return None
        if not pause:
            on_wait()
        pause = min(max(1.5 * pause, 0.002), 0.05)
        time.sleep(pause)


@contextlib.contextmanager
def _sole_compiler(name: str, wait: float, on_wait: Callable[[], None]) -> Iterator[None]:
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


# ---------------------------------------------------------------- forks

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


# ---------------------------------------------------------------- the store


class Store:
    """Artifacts by key, in memory and in ``directory``, safe for any number of threads and processes.

    ``max_bytes`` bounds the disk; memory keeps what the process has used, as its loaded kernels do anyway.
    ``lock_wait`` bounds, in seconds, the wait for another process that compiles the same kernel.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int = 1 << 30, *, lock_wait: float = 60.0
    ) -> None:
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self.lock_wait = lock_wait
        self._memory: dict[str, Artifact] = {}
        self._counters = Counters()
        self._trouble: str | None = None
        self._resting_until = 0.0
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
        if not self._on_disk(lambda database: self._save(database, artifact.key, data), False, create=True):
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
        return self._on_disk(_list_entries, [])

    def verify(self) -> Verified:
        """Check every entry on disk and remove what is damaged or was not written by jitattn."""
        with _disk_lock:
            if self._set_aside_if_broken():
                return Verified(0, (DATABASE,))
        result = self._on_disk(_verify, Verified(0, ()))
        self._count("damaged", len(result.removed))
        return result

    def prune(
        self, max_bytes: int | None = None, unused_for: float | None = None, everything: bool = False
    ) -> Pruned:
        """Shrink the disk to ``max_bytes`` (default: the store's bound), the least recently used going first.

        ``unused_for``: also drop what was last used more than so many seconds ago. ``everything``: empty it.
        """
        with contextlib.suppress(OSError):
            (self.directory / SET_ASIDE).unlink(missing_ok=True)
        limit = self.max_bytes if max_bytes is None else max_bytes
        before = None if unused_for is None else time.time() - unused_for
        return self._on_disk(lambda database: _prune(database, limit, before, everything), Pruned(0, 0))

    def info(self) -> StoreInfo:
        """Size, number of entries and counters; makes nothing on disk."""
        entries, size = self._on_disk(lambda database: (len(database), database.volume()), (0, 0))
        return StoreInfo(self.directory, entries, size, self.max_bytes, self.counters(), self._trouble)

    def counters(self) -> Counters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def close(self) -> None:
        """Let go of what is in memory. The store may be used again."""
        self._memory.clear()

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
        if not self._on_disk(_is_writable, False, create=True):
            return contextlib.nullcontext()
        name = f"{os.path.realpath(self.directory)}\0{key}"
        return _sole_compiler(name, self.lock_wait, lambda: self._count("waits"))

    def _read(self, key: str) -> Artifact | None:
        artifact = self._on_disk(lambda database: self._load(database, key), None)
        if artifact is not None:
            self._memory[key] = artifact
        return artifact

    def _load(self, database: Any, key: str) -> Artifact | None:
        try:
            data, last_used = database.get(key, tag=True)
            artifact = None if data is None else Artifact.from_bytes(data, key)
        except Damaged as damage:
            self._count("damaged")
            log.warning("removing a damaged entry from %s: %s", self.directory, damage)
            database.delete(key)
            return None
        if artifact is not None and not _is_recent(last_used):
            # A hit that cannot be noted, on a disk turned read-only for example, is still a hit.
            with contextlib.suppress(Exception):
                database.set(key, data, tag=time.time())
        return artifact

    def _save(self, database: Any, key: str, data: bytes) -> bool:
        database.set(key, data, tag=time.time())
        self._count("evictions", _evict(database, self.max_bytes))
        return True

    def _on_disk(self, action: Callable[[Any], T], otherwise: T, create: bool = False) -> T:
        """``action`` on the open database; ``otherwise`` where there is none or the disk fails.

        ``create``: make the folder and the database if they are missing. A broken database is set aside,
        and the action tried once more without it.
        """
        with _disk_lock:
            if time.monotonic() < self._resting_until:
                return otherwise
            try:
                try:
                    return self._attempt(action, otherwise, create)
                except Exception:
                    if not self._set_aside_if_broken():
                        raise
                    return self._attempt(action, otherwise, create)
            except Exception as error:  # whatever a disk, a database or its library can do wrong
                self._resting_until = time.monotonic() + REST_SECONDS
                reason = f"{type(error).__name__}: {error}"
        self._warn(reason)
        return otherwise

    def _attempt(self, action: Callable[[Any], T], otherwise: T, create: bool) -> T:
        if not (self.directory / DATABASE).exists():
            if not create:
                return otherwise
            _create_database(self.directory)
        with _open_database(self.directory) as database:
            return action(database)

    def _set_aside_if_broken(self) -> bool:
        """Whether the database was broken; it has then been moved out of the way."""
        path = self.directory / DATABASE
        try:
            examined = path.stat()
            if not _is_broken(path):
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


# ---------------------------------------------------------------- actions on an open database


def _is_writable(database: Any) -> bool:
    with database.transact():
        return True


def _is_recent(last_used: object) -> bool:
    return isinstance(last_used, float) and abs(time.time() - last_used) < RECENCY_SECONDS


def _keys(database: Any) -> list[str]:
    """Keys of the rows that jitattn wrote, the most recently used first."""
    rows = database._sql(f"SELECT key FROM Cache WHERE {_OURS} ORDER BY store_time DESC").fetchall()
    return [key for (key,) in rows]


def _list_entries(database: Any) -> list[Entry]:
    entries = (_entry(database, key) for key in _keys(database))
    return [entry for entry in entries if entry is not None]


def _entry(database: Any, key: str) -> Entry | None:
    data, last_used = database.get(key, tag=True)
    if data is None:  # removed by another process since the keys were listed
        return None
    last_used = last_used if isinstance(last_used, float) else 0.0
    try:
        return Entry(key, len(data), last_used, Artifact.from_bytes(data, key).meta)
    except Damaged:
        return Entry(key, len(data), last_used, {}, damaged=True)


def _verify(database: Any) -> Verified:
    removed = []
    with database.transact():
        foreign = f"FROM Cache WHERE NOT ({_OURS})"
        removed += [f"foreign row {row}" for (row,) in database._sql(f"SELECT rowid {foreign}").fetchall()]
        database._sql(f"DELETE {foreign}")
    entries = _list_entries(database)
    for entry in entries:
        if entry.damaged:
            database.delete(entry.key)
            removed.append(entry.key)
    return Verified(sum(not entry.damaged for entry in entries), tuple(removed))


def _evict(database: Any, limit: int) -> int:
    """Delete the least recently used entries until the database fits ``limit`` bytes; how many those were.

    diskcache's own cull deletes ten at a time, which under a small bound is everything.
    """
    oldest = "SELECT rowid FROM Cache ORDER BY store_time LIMIT 1"
    evicted = 0
    while database.volume() > limit:
        with database.transact():
            removed = database._sql(f"DELETE FROM Cache WHERE rowid IN ({oldest})").rowcount
        if not removed:
            break
        evicted += removed
    return evicted


def _prune(database: Any, limit: int, before: float | None, everything: bool) -> Pruned:
    size, count = database.volume(), len(database)
    if everything:
        database.clear()
    elif before is not None:
        with database.transact():
            database._sql("DELETE FROM Cache WHERE store_time < ?", (before,))
    _evict(database, limit)
    return Pruned(count - len(database), max(0, size - database.volume()))


# ---------------------------------------------------------------- the default store


def default() -> Store:
    """The store that the settings of this moment describe; equal settings give the same object."""
    chosen = settings.current()
    # The format's number is in the path, so that two versions of jitattn can share a cache folder.
    return _store(chosen.cache_dir / f"kernels-{FORMAT}", chosen.cache_bytes, chosen.cache_wait)


@functools.cache
def _store(directory: Path, max_bytes: int, lock_wait: float) -> Store:
    return Store(directory, max_bytes, lock_wait=lock_wait)
