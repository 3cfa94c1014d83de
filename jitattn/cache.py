"""jitattn.cache: look at the kernels kept on disk, check them, and make room.

    print(jitattn.cache.info())
    for entry in jitattn.cache.ls(): ...

Every function works on the store that the environment names (JITATTN_CACHE_DIR), makes nothing that is not
there yet, and returns a small dataclass that prints readably.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from . import store
from .store import Entry

__all__ = ["Info", "Listing", "Pruned", "Verified", "info", "ls", "prune", "verify"]


@dataclass(frozen=True)
class Info(store.StoreInfo):
    """Where the cache is, what it holds, and what this process has done with it."""

    def __str__(self) -> str:
        counters = ", ".join(
            f"{name.replace('_', ' ')} {number}" for name, number in vars(self.counters).items() if number
        )
        lines = [
            f"cache         {self.directory}",
            f"kernels       {self.entries} in {format_bytes(self.size)} of {format_bytes(self.max_bytes)}",
            f"this process  {counters or 'has not used it'}",
        ]
        if self.trouble:
            lines.append(f"trouble       {self.trouble}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Listing:
    """The kernels in the cache, the most recently used first."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "the cache is empty"
        head = ("key", "size", "compiled in", "last used", "target", "kernel")
        rows = [head, *(_row(entry) for entry in self.entries)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
        # The last column is as wide as it likes.
        return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


@dataclass(frozen=True)
class Verified(store.Verified):
    """How many kernels passed their check, and which were damaged and are gone."""

    def __str__(self) -> str:
        lines = [f"{self.sound} sound, {len(self.removed)} damaged and removed"]
        return "\n".join(lines + [f"  {name}" for name in self.removed])


@dataclass(frozen=True)
class Pruned(store.Pruned):
    """How many kernels were removed and how many bytes that freed."""

    def __str__(self) -> str:
        kernels = "kernel" if self.removed == 1 else "kernels"
        return f"{self.removed} {kernels} removed, {format_bytes(self.freed)} freed"


def info() -> Info:
    """Size, number of kernels and this process's counters."""
    return Info(**vars(store.default().info()))


def ls() -> Listing:
    """The kernels on disk, each checked as it is read; a damaged one is listed as such."""
    return Listing(tuple(store.default().ls()))


def verify() -> Verified:
    """Check every kernel on disk; remove what is damaged or was not written by jitattn."""
    return Verified(**vars(store.default().verify()))


def prune(max_bytes: int | None = None, unused_for: float | None = None, everything: bool = False) -> Pruned:
    """Remove the least recently used kernels until the cache fits ``max_bytes``.

    By default that is the bound that the cache keeps anyway. ``unused_for``: remove also what was last
    used more than so many seconds ago. ``everything``: remove all.
    """
    return Pruned(**vars(store.default().prune(max_bytes, unused_for, everything)))


def format_bytes(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _row(entry: Entry) -> tuple[str, ...]:
    key, size, age = entry.key[:12], format_bytes(entry.size), _format_age(entry.last_used)
    if entry.damaged:
        return key, size, "", age, "", "damaged"
    meta = entry.meta
    # Any JSON may stand in the meta of a kernel that another version wrote.
    seconds = meta.get("compile_seconds")
    seconds_text = f"{seconds:.2f} s" if isinstance(seconds, int | float) else ""
    kernel = meta.get("description") or meta.get("entry", "")
    return key, size, seconds_text, age, str(meta.get("target", "")), str(kernel)


def _format_age(then: float) -> str:
    """How long ago a Unix time was, in its largest unit."""
    seconds = max(0.0, time.time() - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
