"""CUDA kernels through NVRTC: no driver, no GPU and no header is needed.

The text is C++17 that includes nothing. It defines ``jitattn_kernel`` and ``jitattn_shape``, an array with the threads
of a block and the bytes of dynamic shared memory that a launch needs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import CompileError, ToolchainMissing
from . import Binary, keep_refused
from .nvrtc_library import Library, candidates, look_at, torch_cuda

__all__ = ["Nvrtc", "extra", "find", "listing", "survey"]

_OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")

# Architectures that not all NVRTCs know: the first version that does, and the first that does no longer.
_SINCE = {"100a": (12, 8), "120a": (12, 8), "103a": (12, 9), "121a": (12, 9), "110a": (13, 0)}
_UNTIL = {"70": (13, 0)}
_OLDEST = (12, 0)

# From here on NVRTC keeps binaries on disk itself where there is a driver, and then says nothing of registers and
# spills. This package has a store of its own.
_CACHES = (12, 9)


class Nvrtc:
    """Compiles with one library, in the process."""

    def __init__(self, library: Library, line_info: bool = False) -> None:
        self.library = library
        more = (("--no-cache", library.version[:2] >= _CACHES), ("--generate-line-info", line_info))
        self._options = (*_OPTIONS, *(option for option, wanted in more if wanted))
        self._identity = f"{library}; {' '.join(self._options)}"

    def identity(self) -> str:
        """See Toolchain.identity."""
        return self._identity

    def compile(self, text: str, flags: tuple[str, ...]) -> Binary:
        """See Toolchain.compile. The bytes are a cubin, or PTX where the flags name a virtual architecture."""
        start = time.perf_counter()
        result = self.library.compile(text, (*self._options, *flags))
        if result.error:
            message = f"{self.library} refused a kernel ({result.error})"
            raise CompileError(message, log=result.log, source_path=keep_refused(text, ".cu"))
        data = result.cubin or result.ptx.encode()
        resources = _shape(result.ptx) | (_of_log(result.log) if result.cubin else {})
        return Binary(data, result.log, time.perf_counter() - start, resources)

    def listing(self, binary: bytes) -> str:
        """See Toolchain.listing."""
        return listing(binary)


def find(arch: str) -> Nvrtc:
    """The library that JITATTN_NVRTC names, else the first that compiles for the architecture.

    :raises ToolchainMissing: there is none; the message says what to install.
    """
    places = tuple(os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"))
    now = settings.current()
    return _find(now.nvrtc, arch, now.line_info, places)


@functools.lru_cache(maxsize=64)
def _find(chosen: Path | None, arch: str, line_info: bool, places: tuple[str | None, ...]) -> Nvrtc:
    number = arch.rpartition("_")[2]
    reasons: list[str] = []
    for found in survey(chosen):
        if isinstance(found, str):
            reasons.append(found)
        elif not _SINCE.get(number, _OLDEST) <= found.version[:2] < _UNTIL.get(number, (99,)):
            reasons.append(f"{found} at {found.path} does not know {arch}")
        else:
            return Nvrtc(found, line_info)
    which = "cuda12" if number in _UNTIL else extra()
    raise ToolchainMissing(
        f"no NVRTC for {arch} kernels ({'; '.join(reasons) or 'none found'}). "
        f'pip install "jitattn[{which}]" brings one; JITATTN_NVRTC may name one that is elsewhere'
    )


def survey(chosen: Path | None = None) -> Iterator[Library | str]:
    """Each place where the library is, best first: the library, or one line saying why it is none."""
    return (look_at(path) for path in candidates(chosen))


def extra() -> str:
    """The extra of this package that goes with the installed torch."""
    return "cuda12" if torch_cuda() == 12 else "cuda13"


# ------------------------------------------------------------------------------------------------ what came out


def _shape(ptx: str) -> dict[str, Any]:
    """The values of ``jitattn_shape``; PTX leaves out zeros at the end, and gives them as bytes or as words."""
    found = re.search(r"\.b(8|32) jitattn_shape\[\d+\] = \{([^}]*)\}", ptx)
    if found is None:
        return {}
    size = 1 if found[1] == "8" else 4
    values = b"".join(int(word).to_bytes(size, "little") for word in found[2].split(",")).ljust(8, b"\0")
    return {"threads": int.from_bytes(values[:4], "little"), "shared_bytes": int.from_bytes(values[4:], "little")}


_NUMBERS = {
    "registers": r"Used (\d+) registers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_bytes": r"(\d+) bytes spill stores",
    "static_shared_bytes": r"(\d+) bytes smem",
}


def _of_log(log: str) -> dict[str, Any]:
    """What ptxas reports: the largest of each number, should there be several functions."""
    found: dict[str, Any] = {name: max(map(int, re.findall(p, log)), default=0) for name, p in _NUMBERS.items()}
    # C7508: setmaxnreg is ignored; C7510 to C7519: wgmma is waited for after each instruction.
    warnings = [line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)]
    return found | ({"warnings": warnings} if warnings else {})


# ------------------------------------------------------------------------------------------------ listing


def listing(binary: bytes) -> str:
    """The machine code of a cubin as text, PTX as it is, or a line that says which tool would show it."""
    if not binary.startswith(b"\x7fELF"):
        return binary.decode()
    with tempfile.TemporaryDirectory(prefix="jitattn-") as name:
        path = Path(name) / "kernel.cubin"
        path.write_bytes(binary)
        for words in (("nvdisasm", "--print-code", "--no-dataflow"), ("cuobjdump", "--dump-sass")):
            tool = _tool(words[0])
            done = tool and subprocess.run([tool, *words[1:], str(path)], capture_output=True, text=True)
            if done and done.returncode == 0:
                return done.stdout
    return "no disassembler for this binary here: pip install nvidia-cuda-nvdisasm (CUDA 12: nvidia-cuda-nvcc-cu12)"


def _tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, or from a pip package."""
    if path := shutil.which(name):
        return path
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        for folder in sorted(root.glob("*/bin"), reverse=True):
            if path := shutil.which(name, path=str(folder)):
                return path
    return None
