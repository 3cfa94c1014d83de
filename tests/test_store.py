"""The store at work: layers, counters, single flight, eviction, and the four functions that look at it."""

from __future__ import annotations

import functools
import os
import random
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jitattn import cache, store
from jitattn.artifact import Artifact
from jitattn.errors import StoreWarning
from jitattn.store import DATABASE, Store


@functools.cache
def sample(number: int, size: int = 40_000) -> Artifact:
    """A kernel that differs from the others and does not compress."""
    binary = random.Random(number).randbytes(size)
    return Artifact.create(
        f"int kernel_{number};", binary, target="host:x86-64-v3", entry="run", toolchain="g++",
        compile_seconds=0.7, description=f"kernel {number}",
    )  # fmt: skip


def unwanted() -> Artifact:
    raise AssertionError("nothing had to be built")


def test_layers_and_counters(tmp_path: Path) -> None:
    kernel = sample(1)
    first = Store(tmp_path / "s")
    assert first.get(kernel.key) is None
    assert first.get_or_build(kernel.key, lambda: kernel) == (kernel, "compiled")
    assert first.get_or_build(kernel.key, unwanted) == (kernel, "memory")
    assert first.get(kernel.key) is kernel
    second = Store(tmp_path / "s")
    assert second.get_or_build(kernel.key, unwanted) == (kernel, "disk")
    assert second.get_or_build(kernel.key, unwanted) == (kernel, "memory")
    second.close()
    assert second.get(kernel.key) == kernel
    assert first.counters() == store.Counters(memory_hits=2, misses=2)
    assert second.counters() == store.Counters(memory_hits=1, disk_hits=2)


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    kept = Store(tmp_path / "a" / "s")
    assert kept.get(sample(1).key) is None
    assert kept.ls() == [] and kept.verify() == store.Verified(0, ()) and kept.prune().removed == 0
    assert kept.info().entries == 0
    assert list(tmp_path.iterdir()) == []
    kept.put(sample(1))
    assert [path.name for path in (tmp_path / "a" / "s").iterdir()] == [DATABASE]
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "a" / "s").stat().st_mode) == 0o700


def test_diskcache_and_sqlite_load_at_first_use(tmp_path: Path) -> None:
    command = (
        "import sys; from jitattn.store import Store; kept = Store(sys.argv[1]); kept.get('0' * 64);"
        "print(sorted({'torch', 'numpy', 'diskcache', 'sqlite3'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", command, str(tmp_path / "s")]
    assert subprocess.run(arguments, capture_output=True, text=True).stdout == "[]\n"


def test_keys_are_checked(tmp_path: Path) -> None:
    kept = Store(tmp_path / "s")
    for key in ("", "../../etc/passwd", "A" * 64):
        with pytest.raises(ValueError, match="not a key"):
            kept.get(key)
        with pytest.raises(ValueError, match="not a key"):
            kept.get_or_build(key, unwanted)
    with pytest.raises(ValueError, match="asked for"):
        kept.get_or_build(sample(1).key, lambda: sample(2))
    assert kept.get(sample(1).key) is None and kept.get(sample(2).key) is None


def test_two_hundred_threads_build_once(tmp_path: Path) -> None:
    kernel, kept, built, found = sample(1), Store(tmp_path / "s"), [], []
    start = threading.Barrier(200)

    def build() -> Artifact:
        built.append(threading.get_ident())
        time.sleep(0.2)
        return kernel

    def ask() -> None:
        start.wait()
        found.append(kept.get_or_build(kernel.key, build))

    threads = [threading.Thread(target=ask) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(built) == 1 and len(found) == 200
    assert sorted(origin for _, origin in found) == ["compiled"] + 199 * ["memory"]
    assert all(artifact is kernel for artifact, _ in found)
    counters = kept.counters()
    assert (counters.misses, counters.memory_hits) == (1, 199) and counters.waits > 0


def test_one_build_each_without_a_disk_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept, built, start = Store(tmp_path / "file" / "s"), [], threading.Barrier(8)

    def build(number: int) -> Artifact:
        built.append(number)
        return sample(number)

    def ask() -> None:
        start.wait()
        for number in range(100):
            kept.get_or_build(sample(number).key, functools.partial(build, number))

    with pytest.warns(StoreWarning):
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert sorted(built) == list(range(100))


def test_an_error_reaches_all_who_wait_and_the_key_is_free_again(tmp_path: Path) -> None:
    kernel, kept, errors = sample(1), Store(tmp_path / "s"), []
    start = threading.Barrier(20)

    def build() -> Artifact:
        while kept.counters().waits < 19:  # until all others wait
            time.sleep(0.005)
        raise ZeroDivisionError("this source does not compile")

    def ask() -> None:
        start.wait()
        try:
            kept.get_or_build(kernel.key, build)
        except ZeroDivisionError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == 20 * ["this source does not compile"]
    assert kept.get_or_build(kernel.key, lambda: kernel) == (kernel, "compiled")


def test_an_interrupted_build_is_taken_over_by_a_waiter(tmp_path: Path) -> None:
    kernel, kept, found = sample(1), Store(tmp_path / "s"), []

    def interrupted() -> Artifact:
        while not kept.counters().waits:
            time.sleep(0.005)
        raise KeyboardInterrupt

    def lead() -> None:
        with pytest.raises(KeyboardInterrupt):
            kept.get_or_build(kernel.key, interrupted)

    leader = threading.Thread(target=lead)
    leader.start()
    while not kept.counters().misses:
        time.sleep(0.005)
    waiter = threading.Thread(target=lambda: found.append(kept.get_or_build(kernel.key, lambda: kernel)))
    waiter.start()
    for thread in (leader, waiter):
        thread.join(30)
    assert found == [(kernel, "compiled")]


def test_different_keys_build_side_by_side(tmp_path: Path) -> None:
    kept, both_inside = Store(tmp_path / "s"), threading.Barrier(2)

    def build(number: int) -> Artifact:
        both_inside.wait(20)  # breaks, and fails the test, if one has to wait for the other
        return sample(number)

    def ask(number: int) -> None:
        kept.get_or_build(sample(number).key, functools.partial(build, number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(kept.ls()) == 2


def test_size_is_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    bound = 1_000_000
    kept = Store(tmp_path / "s", max_bytes=bound)
    for number in range(60):
        kept.put(sample(number, 20_000 + 1000 * number))
        assert (tmp_path / "s" / DATABASE).stat().st_size <= bound
    left = [entry.meta["description"] for entry in kept.ls()]
    assert left == [f"kernel {number}" for number in range(59, 59 - len(left), -1)]
    assert 0.85 * bound < kept.info().size <= bound
    assert kept.counters().evictions == 60 - len(left)


def test_use_keeps_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.database, "RECENCY_SECONDS", 0.0)
    bound = 300_000
    for number in range(20):
        Store(tmp_path / "s", bound).put(sample(number))
        assert Store(tmp_path / "s", bound).get(sample(0).key) is not None


def test_reading_writes_nothing_while_the_last_use_is_recent(tmp_path: Path) -> None:
    Store(tmp_path / "s").put(sample(1))
    before = (tmp_path / "s" / DATABASE).stat().st_mtime_ns
    assert Store(tmp_path / "s").get(sample(1).key) == sample(1)
    assert (tmp_path / "s" / DATABASE).stat().st_mtime_ns == before


def test_a_kernel_larger_than_the_bound_is_not_kept_on_disk(tmp_path: Path) -> None:
    kept = Store(tmp_path / "s", max_bytes=100_000)
    kept.put(sample(1))
    large = sample(2, 200_000)
    with pytest.warns(StoreWarning, match="bound"):
        kept.put(large)
    assert kept.get(large.key) == large
    assert [entry.key for entry in kept.ls()] == [sample(1).key]


def test_prune(tmp_path: Path) -> None:
    kept = Store(tmp_path / "s")
    for number in range(6):
        kept.put(sample(number))
    assert kept.prune().removed == 0
    shrunk = kept.prune(max_bytes=200_000)
    assert 0 < shrunk.removed < 6 and shrunk.freed >= shrunk.removed * 40_000
    assert kept.info().size <= 200_000
    assert kept.prune(unused_for=3600).removed == 0
    assert kept.prune(unused_for=-1).removed == 6 - shrunk.removed
    kept.put(sample(7))
    assert kept.prune(everything=True).removed == 1 and kept.ls() == []


def test_settings_choose_the_default_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "one"))
    monkeypatch.setenv("JITATTN_CACHE_SIZE", "2M")
    monkeypatch.setenv("JITATTN_CACHE_WAIT", "5")
    one = store.default()
    assert one.directory.parent == tmp_path / "one"
    assert (one.max_bytes, one.lock_wait) == (2 << 20, 5.0) and store.default() is one
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "two"))
    assert store.default() is not one
    assert list(tmp_path.iterdir()) == []


def test_the_public_module_reads_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path))
    assert str(cache.ls()) == "the cache is empty"
    assert "0 in 0 B of 1.0 GiB" in str(cache.info())
    store.default().put(sample(1))
    store.default().get(sample(1).key)
    (entry,) = cache.ls()
    assert entry.key == sample(1).key and len(cache.ls()) == 1
    head, row = str(cache.ls()).splitlines()
    assert head.split()[0] == "key" and row.startswith(sample(1).key[:12]) and row.endswith("kernel 1")
    assert "0.70 s" in row and "just now" in row and "host:x86-64-v3" in row and "KiB" in row
    assert "memory hits 1" in str(cache.info()) and str(tmp_path) in str(cache.info())
    assert str(cache.verify()) == "1 sound, 0 damaged and removed"
    assert str(cache.prune(everything=True)).startswith("1 kernel removed, ")


def test_format_bytes() -> None:
    for size, text in {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 30: "5.0 GiB"}.items():
        assert cache.format_bytes(size) == text
