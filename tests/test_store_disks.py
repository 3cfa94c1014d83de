"""The store on a disk that cannot be used: full, read-only, locked, gone. A kernel comes out, always."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitattn import store
from jitattn.errors import StoreWarning
from jitattn.store import DATABASE, SET_ASIDE, Store
from tests.stores import KERNEL, database, filled, sample, unwanted

# The warning of a disk that fails is an error wherever a test does not expect it.
pytestmark = pytest.mark.filterwarnings("error::jitattn.errors.StoreWarning")

linux_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.getuid() != 0, reason="mounts need root on Linux"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


def check_memory_only(kept: Store, trouble: str) -> None:
    with pytest.warns(StoreWarning) as warned:
        assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
        assert kept.get_or_build(sample(3).key, lambda: sample(3)) == (sample(3), "compiled")
    assert len(warned) == 1
    assert kept.get_or_build(KERNEL.key, unwanted) == (KERNEL, "memory")
    assert kept.counters().write_failures == 2
    assert trouble in str(kept.info().trouble)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_memory_only(Store(tmp_path / "file" / "s"), "NotADirectoryError")


def test_folder_in_the_database_s_place(tmp_path: Path) -> None:
    (tmp_path / "s" / DATABASE).mkdir(parents=True)
    kept = Store(tmp_path / "s")
    with pytest.warns(StoreWarning):
        assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert kept.get(KERNEL.key) == KERNEL


def test_missing_diskcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diskcache", None)
    check_memory_only(Store(tmp_path / "s"), "diskcache")


def test_database_locked_by_a_stuck_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.database, "BUSY_SECONDS", 0.2)
    with contextlib.closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as stuck:
        stuck.execute("BEGIN EXCLUSIVE")
        kept, start = Store(folder), time.monotonic()
        check_memory_only(kept, "locked")
        assert time.monotonic() - start < 10
        stuck.execute("ROLLBACK")
    assert not (folder / SET_ASIDE).exists()
    assert Store(folder).get_or_build(KERNEL.key, unwanted) == (KERNEL, "disk")


def test_disk_is_tried_again_after_a_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "REST_SECONDS", 0.3)
    (tmp_path / "s").touch()
    kept = Store(tmp_path / "s")
    with pytest.warns(StoreWarning):
        kept.put(KERNEL)
    (tmp_path / "s").unlink()
    kept.put(sample(2))
    assert not (tmp_path / "s").exists()
    time.sleep(0.3)
    kept.put(sample(3))
    assert [entry.key for entry in Store(tmp_path / "s").ls()] == [sample(3).key]


def test_folder_removed_while_in_use(tmp_path: Path) -> None:
    kept = Store(tmp_path / "s")
    for number in range(3):
        assert kept.get_or_build(sample(number).key, lambda n=number: sample(n)) == (
            sample(number),
            "compiled",
        )
        (tmp_path / "s").rename(tmp_path / f"gone {number}")
    kept.close()
    assert kept.get(KERNEL.key) is None
    assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert Store(tmp_path / "s").get(KERNEL.key) == KERNEL


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount something on a new folder, undone after the test; skips where that is not allowed."""
    mounted: list[Path] = []

    def at(name: str, *arguments: str) -> Path:
        point = tmp_path / name
        point.mkdir()
        if subprocess.run(["mount", *arguments, str(point)], capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(point)
        return point

    yield at
    for point in mounted:
        subprocess.run(["umount", str(point)], check=True)


@linux_root
def test_full_disk(mount: Callable[..., Path]) -> None:
    point = mount("small", "-t", "tmpfs", "-o", "size=256k", "tmpfs")
    kept = Store(point / "s")
    with pytest.warns(StoreWarning, match="full"):
        for number in range(10):
            assert kept.get_or_build(sample(number).key, lambda n=number: sample(n))[1] == "compiled"
    assert all(kept.get(sample(number).key) == sample(number) for number in range(10))
    checked = Store(point / "s").verify()
    assert checked.sound >= 2 and not checked.removed


@linux_root
def test_read_only_disk_is_still_read(folder: Path, mount: Callable[..., Path]) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = x'00' WHERE key = ?", (sample(2).key,))
    point = mount("read-only", "--bind", "-o", "ro", str(folder))
    if not os.statvfs(point).f_flag & os.ST_RDONLY:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(point)], check=True)
    kept = Store(point)
    with pytest.warns(StoreWarning, match="writing"):
        for kernel in (sample(2), sample(3)):
            assert kept.get_or_build(kernel.key, lambda kernel=kernel: kernel) == (kernel, "compiled")
        assert kept.verify() == store.Verified(0, ())
    assert kept.get_or_build(KERNEL.key, unwanted) == (KERNEL, "disk")
