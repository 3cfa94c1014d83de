"""Kernel text -> a shared library with the kernel and the engine that runs it, kept by content."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jitattn import source, target
from jitattn.toolchain import host

HERE = Path(__file__).resolve().parent
DEVICE = HERE / "device"

# Hidden, because ELF has one copy in a process of variables that several libraries define, as far as they show.
_COMMON = ("-fvisibility=hidden", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-U_FORTIFY_SOURCE", "-w")
_ENGINE = ("-O3",)
# -fsanitize=thread has the compiler call the engine before every plain load and store (engine/plain.h). Compilers for
# GPUs contract products and sums, and take pointers to other types as they come.
_KERNEL = ("-O1", "-g1", "-fsanitize=thread", "-ffp-contract=fast", "-fno-strict-aliasing")


class BuildError(Exception):
    """The compiler refused; the message is what it said."""


def library(text: str, flags: Sequence[str] = ()) -> Path:
    """The library made from a kernel's text.

    :raises BuildError: the compiler refused it.
    """
    return _made("kernel", _digest(text, *flags), lambda out: _build_kernel(text, tuple(flags), out))


def call_site(path: Path, offsets: Sequence[int]) -> list[str]:
    """Where in the kernel's text the calls at these offsets stand, innermost first; nothing if no tool can tell."""
    words = [f"{offset - 1:#x}" for offset in offsets]  # a return address stands behind its call
    try:
        command = ["addr2line", "-i", "-e", str(path), *words]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    lines = (os.path.normpath(line.split(" (discriminator")[0]) for line in said.splitlines())
    return [line for line in lines if not line.endswith("?") and "emulator/device/" not in line]


def _build_kernel(text: str, flags: tuple[str, ...], out: Path) -> None:
    engine = _made("engine", _digest(*flags), lambda path: _compile(["-c", *_ENGINE, *flags, _ENGINE_FILE], path))
    with tempfile.TemporaryDirectory(prefix="jitattn-") as name:
        file, compiled = Path(name) / "kernel.cpp", Path(name) / "kernel.o"
        file.write_text(text, encoding="utf-8")
        _compile(["-c", *_KERNEL, *flags, str(file)], compiled)
        # The sanitizer's option is not there when linking: its library stays out.
        _compile(
            ["-shared", str(compiled), str(engine), "-lc++" if host.find().compiler.kind == "zig" else "-lstdc++"], out
        )


_ENGINE_FILE = str(HERE / "engine" / "engine.cpp")


def _compile(arguments: list[str], out: Path) -> None:
    compiler = host.find().compiler
    program, options = compiler.program, ("-march=native",)
    if compiler.kind == "zig":  # which would also check for undefined behaviour, with a library of its own
        program, options = (*program[:-1], "c++"), ("-mcpu=native", "-fno-sanitize=undefined")
    command = [
        *program, *_COMMON, *options, f"-ffile-prefix-map={os.getcwd()}=.", "-I", str(DEVICE),
        "-I", str(source.kernel_src()), *compiler.options, *arguments, "-o", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}")


def _made(kind: str, digest: str, build: Callable[[Path], None]) -> Path:
    """The file of that kind and digest, which `build` makes if there is none."""
    folder = _folder()
    suffix = ".so" if kind == "kernel" else ".o"
    path = folder / f"{kind}-{digest}{suffix}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        half_made = folder / f"{path.stem}.{os.getpid()}-{threading.get_ident()}{suffix}"
        build(half_made)
        os.replace(half_made, path)
    return path


def _folder() -> Path:
    kept = os.environ.get("JITATTN_TEST_CACHE") or os.environ.get("JITATTN_CACHE_DIR") or tempfile.gettempdir()
    return Path(kept) / "emulator"


def _digest(*words: str) -> str:
    """Of everything that a library is made from."""
    said = (*_COMMON, *_ENGINE, *_KERNEL, str(host.find().compiler), target.host().arch, _sources(), *words)
    return hashlib.sha256("\0".join(said).encode()).hexdigest()[:24]


@functools.cache
def _sources() -> str:
    files = sorted([*DEVICE.iterdir(), *(HERE / "engine").iterdir(), source.kernel_src() / "base" / "types.h"])
    return "\0".join(file.read_text(encoding="utf-8") for file in files)
