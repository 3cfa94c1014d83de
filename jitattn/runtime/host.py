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
from ..errors import JitattnError
from . import team

__all__ = ["Loaded", "load"]

# kernel_src/arch/host/launch.h: blocks taken, done and in all; workers, their memory, bytes for each.
_JOB = struct.Struct("=6q")


class Loaded:
    """A kernel that can be launched. Any number of threads may launch it at once."""

    __slots__ = ("_library", "_wait", "_work", "_work_address", "_worker_bytes", "_workspace_bytes")

    def __init__(self, binary: bytes) -> None:
        self._library = library = load(binary)
        self._worker_bytes = _function(library.jitattn_worker_bytes, ctypes.c_int64, ctypes.c_char_p)
        self._workspace_bytes = _function(library.jitattn_workspace_bytes, ctypes.c_int64, ctypes.c_char_p)
        self._work = _function(library.jitattn_work, None, ctypes.c_void_p)
        self._wait = _function(library.jitattn_wait, None, ctypes.c_void_p)
        self._work_address = ctypes.cast(self._work, ctypes.c_void_p).value or 0

    def workspace_bytes(self, parameters: bytes) -> int:
        """Bytes of workspace that a problem wants; its pointers do not matter."""
        return self._workspace_bytes(parameters)

    def launch(self, blocks: int, constants: bytes, pointers: bytes, threads: int) -> None:
        """Run all blocks on up to `threads` threads, this one among them, and return when they are done.

        The parameters are those of a params.Table: first the packed pointers, then the packed constants.
        """
        if blocks == 0:
            return
        workers = min(threads, blocks)
        parameters = pointers + constants
        worker_bytes = -(-self._worker_bytes(parameters) // team.ALIGNMENT) * team.ALIGNMENT
        memory = team.scratch(workers * worker_bytes)
        job = bytearray(_JOB.pack(0, 0, blocks, 0, memory.address, worker_bytes) + parameters)
        address = ctypes.addressof(ctypes.c_char.from_buffer(job))
        if workers == 1:
            self._work(address)
        elif team.openmp is not None:
            team.openmp(self._work_address, address, workers, 0)
        else:
            team.call(workers - 1, self._help, (job, address))
            self._work(address)
            self._wait(address)

    def _help(self, job: bytearray, address: int) -> None:
        """A helper's part. Coming late it finds no block left and touches nothing but the job, which it keeps alive."""
        self._work(address)


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
