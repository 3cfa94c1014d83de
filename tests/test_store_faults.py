"""Damaged and hostile entries, and a broken database: a kernel comes out, always.

The faults are real: rows and files are altered behind the store's back.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitattn import store
from jitattn.store import DATABASE, SET_ASIDE, Store
from tests.stores import KERNEL, database, filled, sample, unwanted

# The warning of a disk that fails is an error wherever a test does not expect it.
pytestmark = pytest.mark.filterwarnings("error::jitattn.errors.StoreWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


def check_replaced(folder: Path, damaged: int = 1) -> None:
    """KERNEL's entry counts as missing and is replaced; the other one is untouched."""
    kept = Store(folder)
    assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert kept.counters().damaged == damaged
    again = Store(folder)
    assert again.get_or_build(KERNEL.key, unwanted) == (KERNEL, "disk")
    assert again.get_or_build(sample(2).key, unwanted) == (sample(2), "disk")
    assert again.verify() == store.Verified(2, ())


# ---------------------------------------------------------------- damaged and hostile entries

# Some 40 kB; how many exactly differs with the time at which it is made.
DATA = KERNEL.to_bytes()


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, 300, 20_000, -33, -1])
def test_truncated_entry(length: int, folder: Path) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = ? WHERE key = ?", (DATA[:length], KERNEL.key))
    check_replaced(folder)


@pytest.mark.parametrize("offset", [0, 9, 13, 17, 21, 29, 40, 260, 20_000, -1])
def test_flipped_bit(offset: int, folder: Path) -> None:
    flipped = bytearray(DATA)
    flipped[offset] ^= 4
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = ? WHERE key = ?", (bytes(flipped), KERNEL.key))
    check_replaced(folder)


def test_entry_of_another_key(folder: Path) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = ? WHERE key = ?", (sample(3).to_bytes(), KERNEL.key))
    check_replaced(folder)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_pickled_row_is_never_loaded(in_a_file: bool, folder: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    (folder / "bomb.val").write_bytes(bomb)
    value, filename = (None, "bomb.val") if in_a_file else (bomb, None)
    with database(folder) as connection:
        row = (value, filename, KERNEL.key)
        connection.execute("UPDATE Cache SET mode = 4, value = ?, filename = ? WHERE key = ?", row)
    assert KERNEL.key not in [entry.key for entry in Store(folder).ls()]
    check_replaced(folder)
    assert not (tmp_path / "exploded").exists()


def test_pickled_key_is_never_loaded(folder: Path, tmp_path: Path) -> None:
    with database(folder) as connection:
        key = pickle.dumps(Bomb(tmp_path / "exploded"))
        connection.execute("UPDATE Cache SET raw = 0, key = ? WHERE key = ?", (key, KERNEL.key))
    kept = Store(folder)
    assert [entry.key for entry in kept.ls()] == [sample(2).key]
    assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert len(kept.verify().removed) == 1 and kept.verify() == store.Verified(2, ())
    assert kept.prune(everything=True).removed == 2
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
@pytest.mark.parametrize("removal", ["read", "verify", "prune"])
def test_foreign_file_is_left_alone(mode: int, removal: str, folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "precious"
    foreign.write_bytes(DATA)  # would pass the entry's own check
    with database(folder) as connection:
        row = (mode, str(foreign), KERNEL.key)
        connection.execute("UPDATE Cache SET mode = ?, filename = ?, value = NULL WHERE key = ?", row)
    kept = Store(folder)
    if removal == "verify":
        assert len(kept.verify().removed) == 1
    elif removal == "prune":
        kept.prune(everything=True)
        kept.put(sample(2))
    check_replaced(folder, damaged=int(removal == "read"))
    assert foreign.read_bytes() == DATA


@pytest.mark.parametrize("value", ["text", 17, 1.5, None])
def test_value_of_another_type(value: object, folder: Path) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = ?, tag = 'odd' WHERE key = ?", (value, KERNEL.key))
    check_replaced(folder)


def test_verify_removes_what_is_damaged(folder: Path) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = x'00' WHERE key = ?", (KERNEL.key,))
        connection.execute("INSERT INTO Cache (key, raw, mode, value) VALUES ('short', 1, 1, x'00')")
        connection.execute("INSERT INTO Cache (key, raw, mode) VALUES (NULL, NULL, NULL)")
    kept = Store(folder)
    assert [entry.damaged for entry in kept.ls()] == [False, True]
    result = kept.verify()
    assert result.sound == 1 and len(result.removed) == 3 and KERNEL.key in result.removed
    assert kept.counters().damaged == 3
    assert kept.verify() == store.Verified(1, ())


# ---------------------------------------------------------------- a broken database


def overwrite(start: int, data: bytes) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(data)

    return apply


def another_database(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE Notes (text)")


DATABASE_FAULTS = {
    "garbage": lambda path: path.write_bytes(b"garbage " * 4096),
    "empty": lambda path: path.write_bytes(b""),
    "cut in a page": lambda path: os.truncate(path, 6000),
    "first page lost": overwrite(0, bytes(4096)),
    "header changed": overwrite(16, b"\xff\xff\xff\xff"),
    "middle pages lost": overwrite(4096, bytes(16 * 4096)),
    "another program's database": another_database,
}


@pytest.mark.parametrize("fault", DATABASE_FAULTS)
def test_broken_database_is_made_anew(fault: str, folder: Path) -> None:
    DATABASE_FAULTS[fault](folder / DATABASE)
    kept = Store(folder)
    assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert Store(folder).get_or_build(KERNEL.key, unwanted) == (KERNEL, "disk")
    assert Store(folder).verify() == store.Verified(1, ())
    assert (folder / SET_ASIDE).exists()
    kept.prune()
    assert [path.name for path in folder.iterdir()] == [DATABASE]


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    Store(tmp_path / "s").put(KERNEL)
    assert Store(tmp_path / "s").get(KERNEL.key) == KERNEL


def test_leftovers_of_a_killed_process_are_swept(folder: Path) -> None:
    for name, age in (("new-old", 7200), ("new-young", 0)):
        (folder / name).mkdir()
        os.utime(folder / name, (time.time() - age, time.time() - age))
    Store(folder).prune()
    assert {path.name for path in folder.iterdir()} == {DATABASE, "new-young"}


def test_verify_finds_a_broken_database(folder: Path) -> None:
    with (folder / DATABASE).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(16 * 4096))
    kept = Store(folder)
    assert kept.verify().removed == (DATABASE,)
    assert kept.ls() == []


def test_journal_of_a_broken_database_is_not_played_into_the_next(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        connection.executescript("PRAGMA synchronous = FULL; PRAGMA cache_size = 1; BEGIN")
        connection.execute("UPDATE Cache SET value = randomblob(40000), tag = 'half done'")
        journal = (folder / f"{DATABASE}-journal").read_bytes()
        connection.execute("ROLLBACK")
    (folder / DATABASE).write_bytes(b"garbage " * 40_000)
    (folder / f"{DATABASE}-journal").write_bytes(journal)
    assert Store(folder).get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert Store(folder).get_or_build(KERNEL.key, unwanted) == (KERNEL, "disk")
    assert Store(folder).verify() == store.Verified(1, ())
