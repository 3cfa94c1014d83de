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

from .. import settings
from ..errors import JitattnError
from . import team

__all__ = ["Loaded", "load"]

_QUEUE = struct.Struct("=3q")  # kernel_src/arch/host/launch.h: blocks taken, blocks done, blocks in all


class Loaded:
    """A kernel that can be launched. Any number of threads may launch it at once."""

    __slots__ = ("_library", "_memory_bytes", "_run")

    def __init__(self, binary: bytes) -> None:
        self._library = load(binary)
        size = self._library.jitattn_memory
        size.restype = ctypes.c_int64
        self._memory_bytes = size()
        self._run = self._library.jitattn_run
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        self._run.restype = None

    def launch(self, blocks: int, constants: bytes, pointers: bytes, threads: int) -> None:
        """Run all blocks on up to `threads` threads, this one among them, and return when they are done.

        The parameters are those of a params.Table: first the packed pointers, then the packed constants.
        """
        if blocks == 0:
            return
        job = bytearray(b"".join((_QUEUE.pack(0, 0, blocks), pointers, constants)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(job))
        helpers = min(threads, blocks) - 1
        if helpers > 0:
            # A helper that comes late finds no block left and touches nothing but the job, which it keeps alive.
            team.call(helpers, self._work, (job, address, 0))
        self._run(address, team.scratch(self._memory_bytes), 1)

    def _work(self, job: bytearray, address: int, wait: int) -> None:
        self._run(address, team.scratch(self._memory_bytes), wait)


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
