"""The store among broken disks, hostile rows, killed and forked processes: a kernel comes out, always.

The faults are real: rows are altered through SQLite, processes are killed, disks are full because they are
small. The warning of a disk that fails is an error here wherever a test does not expect it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitattn import store
from jitattn.artifact import Artifact
from jitattn.errors import StoreWarning
from jitattn.store import DATABASE, SET_ASIDE, Store

pytestmark = pytest.mark.filterwarnings("error::jitattn.errors.StoreWarning")

posix = pytest.mark.skipif(os.name != "posix", reason="fork, signals and record locks")
linux_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.getuid() != 0, reason="mounts need root on Linux"
)


@functools.cache
def sample(number: int, size: int = 40_000) -> Artifact:
    binary = random.Random(number).randbytes(size)
    return Artifact.create(f"int kernel_{number};", binary, target="host", entry="run", toolchain="g++")


KERNEL = sample(1)


def unwanted() -> Artifact:
    raise AssertionError("nothing had to be built")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store's folder with KERNEL and another one in it."""
    kept = Store(tmp_path / "s")
    kept.put(KERNEL)
    kept.put(sample(2))
    return kept.directory


@contextlib.contextmanager
def database(folder: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(folder / DATABASE)) as connection:
        yield connection
        connection.commit()


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

DATA = KERNEL.to_bytes()


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, 300, len(DATA) // 2, len(DATA) - 33, len(DATA) - 1])
def test_truncated_entry(length: int, folder: Path) -> None:
    with database(folder) as connection:
        connection.execute("UPDATE Cache SET value = ? WHERE key = ?", (DATA[:length], KERNEL.key))
    check_replaced(folder)


@pytest.mark.parametrize("offset", [0, 9, 13, 17, 21, 29, 40, 260, len(DATA) // 2, len(DATA) - 1])
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


# ---------------------------------------------------------------- a disk that cannot be used


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


# ---------------------------------------------------------------- processes

# What every child process begins with: a kernel that says in the file "builds" that it is being built.
PRELUDE = """
import os, sys, time, threading, warnings
from pathlib import Path
from jitattn.artifact import Artifact, key_of
from jitattn.errors import StoreWarning
from jitattn.store import Store

warnings.simplefilter("error", StoreWarning)
folder = Path(sys.argv[1])
SOURCE = "int main;"
KEY = key_of(SOURCE)

def say(name):
    with open(folder / name, "a") as file:
        file.write(f"{os.getpid()}\\n")

def kernel(source):
    return Artifact.create(source, os.urandom(9000), target="host", entry="run", toolchain="g++")

def build(seconds=0.0):
    say("builds")
    time.sleep(seconds)
    return kernel(SOURCE)

kept = Store(folder / "s", lock_wait=60)
"""


def start(program: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    text = PRELUDE + textwrap.dedent(program)
    arguments = [sys.executable, "-c", text, str(folder)]
    path = str(Path(store.__file__).parent.parent.parent)
    return subprocess.Popen(
        arguments, env={**os.environ, "PYTHONPATH": path, **environment}, text=True, stdout=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0
    return output.strip()


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def wait_for(path: Path, count: int = 1, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while len(lines(path)) < count:
        assert time.monotonic() < deadline, f"{path.name}: {len(lines(path))} of {count}"
        time.sleep(0.01)


def test_sixteen_processes_build_once(tmp_path: Path) -> None:
    program = """
        say("ready")
        while not (folder / "go").exists():
            time.sleep(0.005)
        print(kept.get_or_build(KEY, lambda: build(0.5))[1])
    """
    processes = [start(program, tmp_path) for _ in range(16)]
    wait_for(tmp_path / "ready", 16)
    (tmp_path / "go").touch()
    origins = sorted(finish(process) for process in processes)
    assert origins == ["compiled"] + 15 * ["disk"]
    assert len(lines(tmp_path / "builds")) == 1
    assert Store(tmp_path / "s").verify() == store.Verified(1, ())


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    program = """
        say("ready")
        while not (folder / "go").exists():
            time.sleep(0.005)
        for number in range(25):
            kept.put(kernel(f"int kernel_{os.getpid()}_{number};"))
    """
    processes = [start(program, tmp_path) for _ in range(6)]
    wait_for(tmp_path / "ready", 6)
    (tmp_path / "go").touch()
    for process in processes:
        finish(process)
    assert Store(tmp_path / "s").verify() == store.Verified(150, ())


WAITER = """
    def report_the_wait():
        while not kept.counters().waits:
            time.sleep(0.01)
        say("waits")
    threading.Thread(target=report_the_wait, daemon=True).start()
    print(kept.get_or_build(KEY, build)[1])
"""


@posix
def test_a_killed_owner_holds_up_nobody(tmp_path: Path) -> None:
    owner = start("kept.get_or_build(KEY, lambda: build(60))", tmp_path)
    wait_for(tmp_path / "builds")
    waiters = [start(WAITER, tmp_path) for _ in range(2)]
    wait_for(tmp_path / "waits", 2)
    owner.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert sorted(finish(waiter) for waiter in waiters) == ["compiled", "disk"]
    assert time.monotonic() - killed < 20  # far less than the wait for a living owner
    owner.communicate()
    assert len(lines(tmp_path / "builds")) == 2
    assert Store(tmp_path / "s").verify() == store.Verified(1, ())


@posix
def test_a_killed_owner_s_orphan_holds_up_nobody(tmp_path: Path) -> None:
    program = """
        def compile_with_a_helper():
            if os.fork() == 0:
                say("orphan")
                time.sleep(60)
                os._exit(0)
            return build(60)
        kept.get_or_build(KEY, compile_with_a_helper)
    """
    owner = start(program, tmp_path)
    wait_for(tmp_path / "builds")
    wait_for(tmp_path / "orphan")
    try:
        waiter = start(WAITER, tmp_path)
        wait_for(tmp_path / "waits")
        owner.send_signal(signal.SIGKILL)
        assert finish(waiter, timeout=40) == "compiled"
    finally:
        os.kill(int(lines(tmp_path / "orphan")[0]), signal.SIGKILL)
        owner.communicate()


def test_a_slow_owner_is_waited_for_only_so_long(tmp_path: Path) -> None:
    owner = start("kept.get_or_build(KEY, lambda: build(60))", tmp_path)
    wait_for(tmp_path / "builds")
    kept = Store(tmp_path / "s", lock_wait=0.3)
    kernel = Artifact.create("int main;", b"x", target="host", entry="run", toolchain="g++")
    begin = time.monotonic()
    assert kept.get_or_build(kernel.key, lambda: kernel) == (kernel, "compiled")
    assert 0.25 < time.monotonic() - begin < 30
    owner.kill()
    owner.communicate()


@posix
def test_writers_killed_at_any_moment_leave_a_sound_store(tmp_path: Path) -> None:
    program = """
        say("ready")
        for number in range(10**6):
            kept.put(kernel(f"int kernel_{os.getpid()}_{number};"))
    """
    moments = random.Random(0)
    for round_ in range(8):
        writer = start(program, tmp_path)
        wait_for(tmp_path / "ready", round_ + 1)
        time.sleep(moments.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        assert not Store(tmp_path / "s").verify().removed
    assert Store(tmp_path / "s").get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert not (tmp_path / "s" / SET_ASIDE).exists()


@posix
def test_fork_after_use_and_in_the_middle_of_it(tmp_path: Path) -> None:
    program = """
        origins = [kept.get_or_build(KEY, build)[1]]

        # One thread keeps the disk busy, another is in the middle of a build that outlives the fork.
        def write():
            for number in range(10**6):
                kept.put(kernel(f"int kernel_{number};"))
        other = kernel("int other;")
        slow = lambda: (say("slow"), time.sleep(60))
        for work in (write, lambda: kept.get_or_build(other.key, slow)):
            threading.Thread(target=work, daemon=True).start()
        while not (folder / "slow").exists():
            time.sleep(0.005)
        kept.lock_wait = 0.1  # the parent goes on holding the lock
        for _ in range(10):
            child = os.fork()
            if child == 0:
                assert kept.get_or_build(KEY, build)[1] == "memory"
                kept.close()
                assert kept.get_or_build(KEY, build)[1] == "disk"
                assert kept.get_or_build(other.key, lambda: other)[1] in ("compiled", "disk")
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        kept.close()
        print(kept.get_or_build(KEY, build)[1])
        sys.stdout.flush()
        os._exit(0)
    """
    assert finish(start(program, tmp_path)) == "disk"
    assert len(lines(tmp_path / "builds")) == 1
    assert not Store(tmp_path / "s").verify().removed


# ---------------------------------------------------------------- the folder of locks


@posix
@pytest.mark.parametrize("fault", ["a file", "a link", "open to others", "no temporary folder"])
def test_unfit_lock_folder_is_not_used(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    locks = temporary / f"jitattn-locks-{os.getuid()}"
    if fault != "no temporary folder":
        temporary.mkdir()
    if fault == "a file":
        locks.touch()
    elif fault == "a link":
        (tmp_path / "elsewhere").mkdir()
        locks.symlink_to(tmp_path / "elsewhere")
    elif fault == "open to others":
        locks.mkdir()
        locks.chmod(0o777)
    kept = Store(tmp_path / "s")
    assert kept.get_or_build(KERNEL.key, lambda: KERNEL) == (KERNEL, "compiled")
    assert Store(tmp_path / "s").get(KERNEL.key) == KERNEL
    if fault in ("a link", "open to others"):
        assert list(locks.iterdir()) == []


@posix
def test_lock_folder_is_private_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locks = tmp_path / f"jitattn-locks-{os.getuid()}"
    inside: list[int] = []

    def build() -> Artifact:
        inside.append(len(list(locks.iterdir())))
        return KERNEL

    Store(tmp_path / "s").get_or_build(KERNEL.key, build)
    assert inside == [1] and list(locks.iterdir()) == []
    assert stat.S_IMODE(locks.stat().st_mode) == 0o700
