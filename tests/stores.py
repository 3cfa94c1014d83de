"""What the tests of the store among faults share: kernels to keep, and a folder that has some."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitattn.artifact import Artifact
from jitattn.store import DATABASE, Store

posix = pytest.mark.skipif(os.name != "posix", reason="fork, signals and record locks")


@functools.cache
def sample(number: int, size: int = 40_000) -> Artifact:
    binary = random.Random(number).randbytes(size)
    return Artifact.create(f"int kernel_{number};", binary, target="host", entry="run", toolchain="g++")


KERNEL = sample(1)


def unwanted() -> Artifact:
    raise AssertionError("nothing had to be built")


def filled(parent: Path) -> Path:
    """A store's folder with KERNEL and another one in it."""
    kept = Store(parent / "s")
    kept.put(KERNEL)
    kept.put(sample(2))
    return kept.directory


@contextlib.contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
        yield connection
        connection.commit()
