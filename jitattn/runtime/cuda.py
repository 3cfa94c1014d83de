"""Cubins and PTX on NVIDIA GPUs, through CuPy's binding of the driver: its calls cost a tenth of what ctypes' do, and
it imports nothing else of CuPy.

A module stays loaded for the life of the process: a captured graph may launch it at any time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifact import Artifact
from ..errors import JitattnError, ToolchainMissing
from ..params import TensorMap
from .tma import Maps

__all__ = ["Launch", "Loaded"]

_MAX_STATIC_SHARED = 48 << 10  # a launch with more must have said so before


@dataclass(frozen=True, slots=True)
class _Function:
    """A kernel on one device."""

    handle: int
    context: int
    threads: int
    shared_bytes: int


class Loaded:
    """A kernel in this process, on each device where it has been asked for."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._functions: dict[int, _Function] = {}
        self._loading = threading.Lock()

    def is_on(self, device: int) -> bool:
        """See pipeline.Loaded."""
        return device in self._functions

    def load(self, device: int) -> None:
        """See pipeline.Loaded.

        :raises JitattnError: the driver does not load the kernel.
        """
        with self._loading:
            if device not in self._functions:
                self._functions[device] = self._loaded(device)

    def prepare(self, blocks: int, parameters: bytes, device: int, maps: Sequence[TensorMap] = ()) -> Launch:
        """See pipeline.Loaded."""
        self.load(device)
        return Launch(self._functions[device], blocks, parameters, maps)

    def _loaded(self, device: int) -> _Function:
        driver, meta = _driver(), self._artifact.meta
        threads, shared_bytes = (meta["resources"].get(name) for name in ("threads", "shared_bytes"))
        if not threads or shared_bytes is None:
            raise JitattnError(f"{meta['description']} does not say how it is launched: it lacks jitattn_shape")
        context = _primary_context(device)
        before = driver.ctxGetCurrent()
        driver.ctxSetCurrent(context)
        try:
            handle = driver.moduleGetFunction(driver.moduleLoadData(self._artifact.binary), meta["entry"])
            if shared_bytes > _MAX_STATIC_SHARED:
                driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            _load_now(handle)
        except driver.CUDADriverError as error:
            raise JitattnError(_refusal(meta, error)) from error
        finally:
            driver.ctxSetCurrent(before)
        return _Function(handle, context, threads, shared_bytes)


class _Arguments:
    """A kernel's one argument, the struct of a params.Table, where the driver finds it."""

    __slots__ = ("_array", "_struct", "address", "view")

    def __init__(self, parameters: bytes, maps: Maps | None) -> None:
        self._struct = ctypes.create_string_buffer(parameters, len(parameters))
        self._array = ctypes.c_void_p(ctypes.addressof(self._struct))
        self.view = memoryview(self._struct).cast("B")
        if maps is not None:
            maps.start(self.view)
        self.address = ctypes.addressof(self._array)


class Launch:
    """A kernel with everything but its pointers. Any number of threads may launch it at once."""

    workspace_bytes = 0

    def __init__(self, function: _Function, blocks: int, parameters: bytes, maps: Sequence[TensorMap] = ()) -> None:
        self._blocks, self._parameters, self._context = blocks, parameters, function.context
        self._maps = Maps(_libcuda(), maps) if maps and blocks else None
        driver = _driver()
        self._current, self._set_current = driver.ctxGetCurrent, driver.ctxSetCurrent
        self._launch = functools.partial(
            driver.launchKernel, function.handle, blocks, 1, 1, function.threads, 1, 1, function.shared_bytes
        )
        # Each launch that is under way has one of these to itself; the driver has copied it when the call returns.
        self._idle: list[_Arguments] = []

    def __call__(self, pointers: bytes, where: Callable[[], int]) -> None:
        """Put all blocks on the stream `where()` and return at once."""
        if not self._blocks:
            return
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = _Arguments(self._parameters, self._maps)
        arguments.view[: len(pointers)] = pointers
        if self._maps is not None:
            self._maps.point(arguments.view, pointers)
        before = self._current()
        if before == self._context:
            self._launch(where(), arguments.address, 0)
        else:
            # Another device is this thread's, or none yet: it must find what it left.
            self._set_current(self._context)
            try:
                self._launch(where(), arguments.address, 0)
            finally:
                self._set_current(before)
        self._idle.append(arguments)


@functools.cache
def _driver() -> Any:
    try:
        return importlib.import_module("cupy_backends.cuda.api.driver")
    except ImportError as error:
        raise ToolchainMissing(
            f'CuPy launches CUDA kernels, and it does not import ({error}): pip install "jitattn[cuda13]", or cuda12 '
            f"where torch is built for CUDA 12"
        ) from error


@functools.cache
def _libcuda() -> ctypes.CDLL:
    """The driver's library, for what CuPy does not bind."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@functools.cache
def _primary_context(device: int) -> int:
    """The context that torch uses on a device."""
    library, ordinal, context = _libcuda(), ctypes.c_int(), ctypes.c_void_p()
    status = library.cuDeviceGet(ctypes.byref(ordinal), device)
    status = status or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
    if status or not context.value:
        raise JitattnError(f"the CUDA driver has no context for device {device} (error {status})")
    return context.value


def _load_now(handle: int) -> None:
    """The driver may put off loading a kernel until its first launch, which may be captured into a graph."""
    load = getattr(_libcuda(), "cuFuncLoad", None)  # from CUDA 12.4 on
    if load is not None:
        load(ctypes.c_void_p(handle))


def _refusal(meta: dict[str, Any], error: Exception) -> str:
    toolchain = meta["toolchain"].partition(";")[0]
    return (
        f"the driver does not load {meta['description']} for {meta['target']}, compiled by {toolchain}: {error}. A "
        f"driver that is older than the compiler may refuse what it makes: update the one, or install an older other, "
        f'such as pip install "nvidia-cuda-nvrtc==13.0.*"'
    )
