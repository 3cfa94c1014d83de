"""Shared libraries from bytes into this process, and their launch on its cores.

A library stays for the life of the process: unloading one while another thread is inside it cannot be made safe.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .. import settings
from ..artifact import Artifact
from ..errors import JitattnError
from . import team

__all__ = ["Launch", "Loaded", "load"]

# kernel_src/arch/host/launch.h: blocks taken, done and in all; workers, bytes for each, their memory. Then parameters.
_HEAD = struct.Struct("=5qQ")
_pack_head = _HEAD.pack_into


class Loaded:
    """A kernel in this process."""

    def __init__(self, artifact: Artifact) -> None:
        library = load(artifact.binary)
        self.worker_bytes = _function(library.jitattn_worker_bytes, ctypes.c_int64, ctypes.c_char_p)
        self.workspace_bytes = _function(library.jitattn_workspace_bytes, ctypes.c_int64, ctypes.c_char_p)
        self.work = _function(library.jitattn_work, None, ctypes.c_void_p)
        self.wait = _function(library.jitattn_wait, None, ctypes.c_void_p)
        self.work_address = ctypes.cast(self.work, ctypes.c_void_p).value or 0

    def is_on(self, device: int) -> bool:
        """See pipeline.Loaded."""
        return True

    def load(self, device: int) -> None:
        """See pipeline.Loaded. There is one host, whatever its index."""

    def prepare(self, blocks: int, parameters: bytes, device: int) -> Launch:
        """See pipeline.Loaded."""
        return Launch(self, blocks, parameters)


class _Job:
    """What a launch hands to the kernel."""

    __slots__ = ("address", "content", "parameters")

    def __init__(self, parameters: bytes) -> None:
        self.content = bytearray(_HEAD.size) + parameters
        self.parameters = memoryview(self.content)[_HEAD.size :]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.content))


class Launch:
    """A kernel with everything but its pointers. Any number of threads may launch it at once."""

    def __init__(self, kernel: Loaded, blocks: int, parameters: bytes) -> None:
        self._kernel, self._blocks = kernel, blocks
        # A problem without blocks may have sizes of 0 that the kernel would divide by; it is never asked.
        self.workspace_bytes: int = kernel.workspace_bytes(parameters) if blocks else 0
        worker_bytes: int = kernel.worker_bytes(parameters) if blocks else 0
        self._worker_bytes = -(-worker_bytes // team.ALIGNMENT) * team.ALIGNMENT
        self._parameters = parameters
        # Each launch that is under way has one of these to itself.
        self._idle: list[_Job] = []

    def __call__(self, pointers: bytes, where: Callable[[], int]) -> None:
        """Run all blocks on up to `where()` threads, this one among them, and return when they are done."""
        blocks = self._blocks
        workers = blocks if blocks < 2 else min(where(), blocks)
        if workers == 0:
            return
        memory = team.scratch(workers * self._worker_bytes)
        try:
            job = self._idle.pop()
        except IndexError:
            job = _Job(self._parameters)
        _pack_head(job.content, 0, 0, 0, blocks, 0, self._worker_bytes, memory.address)
        job.parameters[: len(pointers)] = pointers
        if workers == 1:
            self._kernel.work(job.address)
        elif team.openmp is not None:
            team.openmp(self._kernel.work_address, job.address, workers, 0)
        else:
            team.call(workers - 1, self._help, (job,))
            self._kernel.work(job.address)
            self._kernel.wait(job.address)
            return  # helpers may still look at the job
        self._idle.append(job)

    def _help(self, job: _Job) -> None:
        """A helper's part. Coming late it finds no block left and touches nothing but the job, which it keeps alive."""
        self._kernel.work(job.address)


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def load(binary: bytes) -> ctypes.CDLL:
    """A shared library from its content. Its functions run without the interpreter's lock.

    :raises JitattnError: the system's loader refuses it; the message says why, for each way that was tried.
    """
    refusals: list[str] = []
    for way in _ways():
        try:
            return way(binary)
        except OSError as error:
            refusals.append(str(error))
    raise JitattnError(f"this system does not load a compiled kernel: {'; '.join(refusals)}")


def _ways() -> Iterator[Callable[[bytes], ctypes.CDLL]]:
    if sys.platform == "linux":
        yield _load_from_memory
    if sys.platform == "win32":
        yield _load_and_keep_file
        return
    yield lambda binary: _load_from_file(binary, Path(tempfile.gettempdir()))
    # /tmp may be mounted noexec.
    yield lambda binary: _load_from_file(binary, settings.current().cache_dir)


def _load_from_memory(binary: bytes) -> ctypes.CDLL:
    descriptor = os.memfd_create("jitattn", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(binary)
        # The descriptor stays open. The loader takes two libraries of one name for the same one, so the number
        # must not serve again; and debuggers and profilers read the file through it.
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        raise


def _load_from_file(binary: bytes, parent: Path) -> ctypes.CDLL:
    parent.mkdir(parents=True, exist_ok=True)
    # A new name each time, for the same reason; nobody else can write in the folder.
    with tempfile.TemporaryDirectory(prefix="jitattn-", dir=parent) as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(binary)
        return ctypes.CDLL(str(path))


def _load_and_keep_file(binary: bytes) -> ctypes.CDLL:
    """Windows does not delete a library's file while it is loaded."""
    folder = tempfile.mkdtemp(prefix="jitattn-")
    path = Path(folder) / "kernel.dll"
    path.write_bytes(binary)
    library = ctypes.CDLL(str(path))
    atexit.register(_unload_and_delete, library, folder)
    return library


def _unload_and_delete(library: ctypes.CDLL, folder: str) -> None:
    free = ctypes.windll.kernel32.FreeLibrary  # type: ignore[attr-defined]
    free(ctypes.c_void_p(library._handle))
    shutil.rmtree(folder, ignore_errors=True)
