"""The store shared by processes that run at once, are killed or fork, and the folder of their locks."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from jitattn import store
from jitattn.artifact import Artifact
from jitattn.store import SET_ASIDE, Store
from tests.stores import KERNEL, posix

# The warning of a disk that fails is an error wherever a test does not expect it.
pytestmark = pytest.mark.filterwarnings("error::jitattn.errors.StoreWarning")

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
