"""NVIDIA's compiler library: where it may be, which build it is, and its functions.

Through ctypes: CuPy's binding of it imports all of CuPy, which takes longer than to compile a kernel. Which build a
library is can be read from its file, so that a process that finds its kernels in the cache never loads it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import JitattnError

__all__ = ["Library", "Result", "candidates", "look_at", "torch_cuda"]


@dataclass(frozen=True, slots=True)
class Library:
    """A library that was found and looked at."""

    path: str
    version: tuple[int, ...]
    """All of it: (13, 0, 88)."""
    build: str
    """The compiler's own build number."""

    def __str__(self) -> str:
        return f"NVRTC {'.'.join(map(str, self.version))} build {self.build}"

    def compile(self, text: str, options: Sequence[str]) -> Result:
        """Compile one translation unit. The interpreter's lock is free meanwhile."""
        return _compile(_load(self.path), text, options)


@dataclass(frozen=True, slots=True)
class Result:
    """What the compiler returned: `error` is empty if it accepted the text, `cubin` if it was to make PTX alone."""

    error: str
    log: str
    ptx: str
    cubin: bytes


# ------------------------------------------------------------------------------------------------ where


def candidates(chosen: Path | None) -> Iterator[Path]:
    """Files that may be the library, the best first. With `chosen` (JITATTN_NVRTC) there is one.

    Those of pip packages come first, and among them that of the CUDA version which torch is built for.
    """
    if chosen is not None:
        yield chosen
        return
    seen: set[Path] = set()
    for folders in (_package_folders(), _system_folders()):
        found = [path for folder in folders for path in _libraries(folder) if path not in seen]
        seen.update(found)
        mine = torch_cuda()
        # sorted() keeps the order of folders among those of one version.
        yield from sorted(found, key=lambda path: (_major(path) != mine, -_major(path)))


def torch_cuda() -> int:
    """The major CUDA version that torch is built for, without importing it; 0 if there is none."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin or "").with_name("version.py").read_text(encoding="utf-8") if spec else ""
    except OSError:
        return 0
    found = re.search(r"^cuda\b[^=\n]*=\s*'(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _package_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
        for package in (*sorted(root.glob("cu[0-9]*"), reverse=True), root / "cuda_nvrtc"):
            yield from (package / "lib", package / "bin" / "x86_64", package / "bin")


def _system_folders() -> Iterator[Path]:
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")]
    for root in map(Path, filter(None, [*roots, sys.prefix, "/usr/local/cuda"])):
        yield from (root / "lib64", root / "lib", root / "bin" / "x64", root / "bin", root / "Library" / "bin")
    if sys.platform == "win32":
        yield from (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder)
    else:
        folders = (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder)
        yield from (*folders, *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))


_NAME = re.compile(r"libnvrtc\.so\.(\d+)|nvrtc64_(\d+)0_0\.dll")


def _libraries(folder: Path) -> Iterator[Path]:
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return
    yield from (folder / name for name in names)


def _major(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1] or match[2]) if match else 0


# ------------------------------------------------------------------------------------------------ which


@functools.cache
def look_at(path: Path) -> Library | str:
    """The library at a path, or a line saying why it is none."""
    try:
        version, build = _from_file(path) or _from_output(path)
        return Library(str(path), tuple(int(part) for part in version.split(".")), build)
    except (OSError, ValueError, AttributeError, JitattnError) as error:
        return f"{path}: {error}"


_VERSION = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+\d)")
_BUILD = re.compile(rb"CL-(\d{6,})")


def _from_file(path: Path) -> tuple[str, str] | None:
    """Version and build as the compiler writes them into every output, from among its constants."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        start, end = _constants(memory)
        # Looking for plain words is many times faster than for a pattern, and each is near its end of many megabytes.
        first = memory.find(b"Cuda compilation tools, release ", start, end)
        version, build = _VERSION.match(memory, first) if first >= 0 else None, None
        while build is None and (end := memory.rfind(b"CL-", start, end)) >= 0:
            build = _BUILD.match(memory, end)
        return (version[1].decode(), build[1].decode()) if version and build else None


def _constants(memory: mmap.mmap) -> tuple[int, int]:
    """Where the read-only data of a 64-bit ELF file lies; of any other file, all of it."""
    if memory[:6] != b"\x7fELF\x02\x01":
        return 0, len(memory)
    (table,) = struct.unpack_from("<Q", memory, 0x28)
    size, count, names_index = struct.unpack_from("<3H", memory, 0x3A)
    sections = [struct.unpack_from("<2I4Q", memory, table + size * i) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, length in sections:
        if memory[names + name : names + name + 8] == b".rodata\0":
            return offset, offset + length
    return 0, len(memory)


def _from_output(path: Path) -> tuple[str, str]:
    """The same from the head of what it makes of nothing."""
    ptx = _compile(_load(str(path)), "", ()).ptx.encode()
    version, build = _VERSION.search(ptx), _BUILD.search(ptx)
    if version is None or build is None:
        raise ValueError("the compiler does not say which build it is")
    return version[1].decode(), build[1].decode()


# ------------------------------------------------------------------------------------------------ its functions


@functools.cache
def _load(path: str) -> ctypes.CDLL:
    # It looks for its other half by a bare name, which is found if it is loaded already.
    pattern = "nvrtc-builtins64_*.dll" if sys.platform == "win32" else "libnvrtc-builtins.so*"
    for half in sorted(Path(path).parent.glob(pattern)):
        ctypes.CDLL(str(half))
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _compile(library: ctypes.CDLL, text: str, options: Sequence[str]) -> Result:
    program = ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None))
    try:
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        log = _output(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if status:
            return Result(library.nvrtcGetErrorString(status).decode(), log, "", b"")
        ptx = _output(library, "PTX", program).rstrip(b"\0").decode()
        real = any(re.fullmatch(r"--gpu-architecture=sm_\w+", option) for option in options)
        return Result("", log, ptx, _output(library, "CUBIN", program) if real else b"")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{name}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise JitattnError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")
