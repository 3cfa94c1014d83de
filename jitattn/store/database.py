"""The SQLite file of a store: the only module that knows diskcache, which it imports at first use.

An open database is a diskcache.Cache whose rows all were written by BytesDisk, or else count as foreign.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifact import Artifact, is_key
from ..errors import Damaged

DATABASE = "cache.db"  # diskcache's own name for it
SCRATCH = "new-"  # folders in which a database is prepared
BUSY_SECONDS = 2.0  # how long one operation waits for another process's transaction
RECENCY_SECONDS = 3600.0  # how exactly "least recently used" is known


@dataclass(frozen=True)
class Entry:
    """One entry on disk. Times are Unix seconds, sizes bytes; meta is empty if ``damaged``."""

    key: str
    size: int
    last_used: float
    meta: dict[str, Any]
    damaged: bool = False


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
    "cull_limit": 0,  # evict does it, exactly to the bound
    "statistics": 0,
    # A rollback journal needs no shared memory (WAL does, and then a full or shrunk disk is a SIGBUS).
    "sqlite_journal_mode": "delete",
    "sqlite_mmap_size": 0,
    # A transaction survives SIGKILL without fsync, which takes 7 to 15 ms. A power cut may ruin the database:
    # that is found out, and the database made anew.
    "sqlite_synchronous": 0,
}


@contextlib.contextmanager
def open_database(folder: Path) -> Iterator[Any]:
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


def create_database(folder: Path) -> None:
    """Make ``folder`` (mode 0700) and its database, which appears whole or not at all."""
    import diskcache

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=folder))
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


def is_broken(path: Path) -> bool:
    """Whether the database itself is at fault; no if that cannot be told (it is locked, may not be read)."""
    import sqlite3

    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as connection:
            columns = "key, raw, store_time, expire_time, access_time, tag, size, mode, filename, value"
            connection.execute(f"SELECT {columns} FROM Cache LIMIT 1").fetchall()
            connection.execute("SELECT key, value FROM Settings LIMIT 1").fetchall()
            return connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]
    except sqlite3.OperationalError as error:
        return "no such" in str(error)
    except sqlite3.DatabaseError:
        return True


def is_locked(error: Exception) -> bool:
    """Whether another process's transaction stood in the way."""
    return type(error).__name__ == "Timeout" or "locked" in str(error)


# ---------------------------------------------------------------- actions on an open database


def attempt(change: Callable[[], object]) -> None:
    """A change that reading would like to make: on a read-only disk it fails, and reading goes on."""
    with contextlib.suppress(Exception):
        change()


def is_writable(database: Any) -> bool:
    # In plain SQL, because diskcache's transact() calls every failure a Timeout.
    database._sql("BEGIN IMMEDIATE")
    database._sql("ROLLBACK")
    return True


def is_recent(last_used: object) -> bool:
    return isinstance(last_used, float) and abs(time.time() - last_used) < RECENCY_SECONDS


def size_of(database: Any) -> int:
    """Bytes of the database file, which holds everything."""
    ((pages,),) = database._sql("PRAGMA page_count").fetchall()
    return pages * database._page_size


def keys(database: Any) -> list[str]:
    """Keys of the rows that jitattn wrote, the most recently used first."""
    rows = database._sql(f"SELECT key FROM Cache WHERE {_OURS} ORDER BY store_time DESC").fetchall()
    return [key for (key,) in rows]


def list_entries(database: Any) -> list[Entry]:
    entries = (_entry(database, key) for key in keys(database))
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


def verify(database: Any) -> Verified:
    removed = []
    with database.transact():
        foreign = f"FROM Cache WHERE ({_OURS}) IS NOT TRUE"
        removed += [f"foreign row {row}" for (row,) in database._sql(f"SELECT rowid {foreign}").fetchall()]
        database._sql(f"DELETE {foreign}")
    entries = list_entries(database)
    for entry in entries:
        if entry.damaged:
            database.delete(entry.key)
            removed.append(entry.key)
    return Verified(sum(not entry.damaged for entry in entries), tuple(removed))


def evict(database: Any, limit: int) -> int:
    """Delete the least recently used entries until the database fits ``limit`` bytes; how many those were.

    diskcache's own cull deletes ten at a time, which under a small bound is everything.
    """
    oldest = "SELECT rowid FROM Cache ORDER BY store_time LIMIT 1"
    evicted = 0
    while size_of(database) > limit:
        with database.transact():
            removed = database._sql(f"DELETE FROM Cache WHERE rowid IN ({oldest})").rowcount
        if not removed:
            break
        evicted += removed
    return evicted


def prune(database: Any, limit: int, before: float | None, everything: bool) -> Pruned:
    size, count = size_of(database), len(keys(database))
    if everything:
        database.clear()
    elif before is not None:
        with database.transact():
            database._sql("DELETE FROM Cache WHERE store_time < ?", (before,))
    evict(database, limit)
    return Pruned(count - len(keys(database)), max(0, size - size_of(database)))
