"""CUDA launches against a driver that writes down what it is told: no GPU is needed."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from jitattn import params
from jitattn.artifact import Artifact
from jitattn.errors import JitattnError, ToolchainMissing
from jitattn.runtime import cuda

TABLE = params.FORWARD
SIZE = TABLE.size


class DriverError(RuntimeError):
    """As CuPy raises."""


@dataclass
class Driver:
    """As much of the driver as a launch needs. Each thread has its current context."""

    CUDADriverError = DriverError
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    own: threading.local = field(default_factory=threading.local)
    fails: str = ""

    def ctxGetCurrent(self) -> int:
        return getattr(self.own, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:
        self.own.context = context

    def moduleLoadData(self, image: bytes) -> int:
        if self.fails:
            raise DriverError(self.fails)
        self.calls.append(("load", self.ctxGetCurrent(), image))
        return 100 + self.ctxGetCurrent()

    def moduleGetFunction(self, module: int, name: str) -> int:
        self.calls.append(("function", module, name))
        return 1000 + module

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.calls.append(("attribute", function, attribute, value))

    def launchKernel(self, function: int, *rest: int) -> None:
        *shape, stream, argument, extra = rest
        assert extra == 0
        if self.fails:
            raise DriverError(self.fails)
        (struct,) = ctypes.cast(argument, ctypes.POINTER(ctypes.c_void_p))[0:1]
        content = ctypes.string_at(struct, SIZE)
        self.calls.append(("launch", self.ctxGetCurrent(), function, tuple(shape), stream, content))

    def launches(self) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == "launch"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Contexts are 10 on device 0, 11 on device 1; this thread's is that of device 0."""
    made = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: made)
    monkeypatch.setattr(cuda, "_primary_context", lambda device: 10 + device)
    monkeypatch.setattr(cuda, "_load_now", lambda handle: made.calls.append(("now", handle)))
    made.ctxSetCurrent(10)
    return made


def artifact(**resources: int) -> Artifact:
    return Artifact.create(
        "text", b"cubin", target="cuda:sm_90", entry="jitattn_kernel", toolchain="NVRTC 13.0.88 build 1; -std=c++17",
        resources={"threads": 128, "shared_bytes": 1000} | resources, description="forward float16",
    )  # fmt: skip


def parameters(scale: float = 0.5) -> bytes:
    return TABLE.parameters(dict.fromkeys(TABLE.integers, 7) | {"scale": scale})


def pointers(*first: int) -> bytes:
    return TABLE.pack_pointers().pack(*first, *range(1, len(TABLE.pointers) + 1 - len(first)))


def test_a_launch(driver: Driver) -> None:
    kernel = cuda.Loaded(artifact())
    assert not kernel.is_on(0)
    launch = kernel.prepare(5, parameters(), 0)
    assert kernel.is_on(0) and not kernel.is_on(1) and launch.workspace_bytes == 0
    assert driver.calls == [("load", 10, b"cubin"), ("function", 110, "jitattn_kernel"), ("now", 1110)]
    for turn in (1, 2):
        launch(pointers(turn), lambda: 77)
    expected = [pointers(turn) + parameters()[len(pointers(turn)) :] for turn in (1, 2)]
    assert driver.launches() == [(10, 1110, (5, 1, 1, 128, 1, 1, 1000), 77, content) for content in expected]


def test_nothing_to_do_is_no_launch(driver: Driver) -> None:
    cuda.Loaded(artifact()).prepare(0, parameters(), 0)(pointers(), lambda: 1 // 0)
    assert driver.launches() == []


@pytest.mark.parametrize(("shared_bytes", "asks"), [(49152, False), (49153, True), (232448, True)])
def test_much_shared_memory_is_asked_for(driver: Driver, shared_bytes: int, asks: bool) -> None:
    launch = cuda.Loaded(artifact(shared_bytes=shared_bytes)).prepare(1, parameters(), 0)
    assert (("attribute", 1110, 8, shared_bytes) in driver.calls) == asks
    launch(pointers(), lambda: 0)
    assert driver.launches()[0][2][-1] == shared_bytes


@pytest.mark.parametrize("before", [10, 0])
def test_another_device_than_the_current_one(driver: Driver, before: int) -> None:
    """The launch happens in the device's own context, and the thread finds its own again, also after a failure."""
    driver.ctxSetCurrent(before)
    launch = cuda.Loaded(artifact()).prepare(1, parameters(), 1)
    assert driver.calls[0] == ("load", 11, b"cubin") and driver.ctxGetCurrent() == before
    launch(pointers(), lambda: 3)
    assert driver.launches()[0][:2] == (11, 1111) and driver.ctxGetCurrent() == before
    driver.fails = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(DriverError, match="LAUNCH_FAILED"):
        launch(pointers(), lambda: 3)
    assert driver.ctxGetCurrent() == before


def test_each_device_has_its_own_module(driver: Driver) -> None:
    kernel = cuda.Loaded(artifact())
    for device in (0, 1, 0, 1):
        kernel.load(device)
    assert [call[1] for call in driver.calls if call[0] == "load"] == [10, 11]
    assert driver.ctxGetCurrent() == 10


def test_many_threads_launch_at_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds the kernel loaded once, and its own pointers in the argument, though all launch the same one."""
    kernel, count = cuda.Loaded(artifact()), 8
    barrier = threading.Barrier(count)
    together = threading.Barrier(count)
    plain = Driver.launchKernel

    def slow(self: Driver, *arguments: int) -> None:
        together.wait(10)  # all have written their argument, none has been read yet
        plain(self, *arguments)

    monkeypatch.setattr(Driver, "launchKernel", slow)

    def work(number: int) -> None:
        barrier.wait(10)
        launch = kernel.prepare(1, parameters(), 0)
        launches[0] = launches.get(0, launch)
        barrier.wait(10)
        for turn in range(20):
            launches[0](pointers(number, turn), lambda: number)

    launches: dict[int, cuda.Launch] = {}
    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [call[0] for call in driver.calls].count("load") == 1
    told = [(stream, content[:16]) for _, _, _, stream, content in driver.launches()]
    assert sorted(told) == sorted((n, pointers(n, turn)[:16]) for n in range(1, count + 1) for turn in range(20))


def test_a_kernel_that_the_driver_refuses_is_an_error_with_a_way_out(driver: Driver) -> None:
    driver.fails = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    kernel = cuda.Loaded(artifact())
    with pytest.raises(JitattnError, match=r"NVRTC 13.0.88 build 1: CUDA_ERROR_UNSUPPORTED.*nvidia-cuda-nvrtc=="):
        kernel.load(0)
    assert not kernel.is_on(0) and driver.ctxGetCurrent() == 10
    driver.fails = ""
    kernel.load(0)
    assert kernel.is_on(0)


def test_a_kernel_without_a_shape_is_an_error(driver: Driver) -> None:
    with pytest.raises(JitattnError, match="forward float16.*jitattn_shape"):
        cuda.Loaded(artifact(threads=0)).load(0)


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cuda.importlib, "import_module", missing)
    cuda._driver.cache_clear()
    try:
        with pytest.raises(ToolchainMissing, match=r"cupy_backends.*pip install \"jitattn\[cuda13\]\".*cuda12"):
            cuda.Loaded(artifact()).load(0)
    finally:
        cuda._driver.cache_clear()


def test_cupy_has_what_is_called() -> None:
    driver = pytest.importorskip("cupy_backends.cuda.api.driver")
    assert issubclass(driver.CUDADriverError, RuntimeError)
    assert driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == 8
    for name in (
        "ctxGetCurrent", "ctxSetCurrent", "moduleLoadData", "moduleGetFunction", "funcSetAttribute", "launchKernel"
    ):  # fmt: skip
        assert callable(getattr(driver, name))
    # A driver or none: what is no number does not reach it.
    with pytest.raises(TypeError):
        driver.launchKernel(*["x"] * 11)
