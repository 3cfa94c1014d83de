"""The machine's own C++ compiler: GCC, Clang, or the Clang inside Zig, which pip can install.

What is compiled is C++17 that includes no header and calls nothing but libm and the memory functions, so a
bare compiler is enough. It exports ``extern "C"`` functions of default visibility from a small shared library.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from .. import settings
from ..errors import CompileError, ToolchainMissing
from . import Binary, keep_refused

__all__ = ["Compiler", "HostToolchain", "find", "listing", "probe", "survey"]

_NAMES = ("c++", "g++", "clang++")

_OPTIONS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fno-stack-protector",  # some distributions turn it on; it would check every frame that holds a tile
    # Notes of GCC about vectors: arguments that GCC 4 passed differently, template arguments of such a type.
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)

# The oldest compilers that have every builtin which the kernels use, and the oldest that know the x86-64
# levels by name. Apple's Clang counts by the LLVM release that it is made from.
_OLDEST = {"gcc": 9, "clang": 10, "zig": 0}
_LEVELS_SINCE = {"gcc": 11, "clang": 12, "zig": 0}
_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe", "-mpopcnt", "-mcx16", "-msahf")
_V4 = (*_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_LEVELS = {"-march=x86-64-v3": _V3, "-march=x86-64-v4": _V4}
_ZIG_CPUS = {
    "-march=x86-64": "x86_64",
    "-march=x86-64-v3": "x86_64_v3",
    "-march=x86-64-v4": "x86_64_v4",
    "-march=armv8-a": "generic",
}

_INSTALL = (
    "Install one: 'apt install g++' (Debian, Ubuntu), 'dnf install gcc-c++' (Fedora, RHEL), "
    "'xcode-select --install' (macOS), or anywhere \"pip install 'jitattn[cpu]'\", which brings the ziglang "
    "package. JITATTN_CXX may name a compiler that is not on PATH. Microsoft's cl will not do: it has no vector "
    "extensions."
)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that was found and asked who it is."""

    program: tuple[str, ...]
    """What is run: one path, or more words for "ccache g++" and "zig cc"."""
    options: tuple[str, ...]
    """What JITATTN_CXX adds. They follow this module's own options and so win over them."""
    kind: Literal["gcc", "clang", "zig"]
    major: int
    version: str
    """Its whole version line, with the distribution's build where it has one."""
    triple: str
    """The machine that it makes code for."""

    @property
    def system(self) -> str:
        """What it makes code for, in sys.platform's words; "linux" stands for every system with ELF files."""
        if any(word in self.triple for word in ("darwin", "macos")):
            return "darwin"
        return "win32" if any(word in self.triple for word in ("windows", "mingw")) else "linux"

    def __str__(self) -> str:
        return f"{self.version} at {shlex.join(self.program)}"


class _Link(NamedTuple):
    """One way to make a shared library."""

    options: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """What follows kernel.cpp on the command line."""


class HostToolchain:
    """Compiles with one compiler, in a process for each translation unit."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        # A user's option may hold a path (--sysroot=...), which counts but must not show.
        chosen = (_digest(word) if "/" in word or "\\" in word else word for word in compiler.options)
        linking = " | ".join(" ".join((*link.options, *link.inputs)) for link in _links(compiler))
        self._identity = f"{compiler.version}; {compiler.triple}; " + " ".join([*_OPTIONS, linking, *chosen])

    def identity(self) -> str:
        """See Toolchain.identity."""
        return self._identity

    def compile(self, text: str, flags: tuple[str, ...]) -> Binary:
        """See Toolchain.compile. The bytes are a shared library."""
        start = time.perf_counter()
        status, log = 0, ""
        # Short relative names in a folder of its own: no path reaches the binary or the log.
        with tempfile.TemporaryDirectory(prefix="jitattn-") as name:
            folder = Path(name)
            (folder / "kernel.cpp").write_text(text, encoding="utf-8", newline="\n")
            (folder / "entry.cpp").write_text(_WINDOWS_ENTRY, encoding="utf-8")
            extra = _zig_folders(folder) if self.compiler.kind == "zig" else {}
            for link in _links(self.compiler):
                options = (*_OPTIONS, *_spelled(flags, self.compiler), *link.options, *self.compiler.options)
                inputs = ("kernel.cpp", *link.inputs, "-o", "kernel.out")
                status, log = _run([*self.compiler.program, "-x", "c++", *options, *inputs], folder, **extra)
                if status == 0:
                    data = (folder / "kernel.out").read_bytes()
                    return Binary(data, log, time.perf_counter() - start)
                if "undefined symbol" not in log:
                    break
        message = f"{self.compiler} refused a kernel (exit status {status}){_advice(log)}"
        raise CompileError(message, log=log, source_path=keep_refused(text, ".cpp"))

    def listing(self, binary: bytes) -> str:
        """See Toolchain.listing."""
        return listing(binary)


def find() -> HostToolchain:
    """The compiler that JITATTN_CXX names, else the first on PATH, else ziglang's; looked for once.

    :raises ToolchainMissing: none of them will do; the message says why and what to install.
    """
    return _find(settings.current().cxx, os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(cxx: str | None, path: str) -> HostToolchain:
    reasons: list[str] = []
    for found in survey(cxx):
        if isinstance(found, Compiler):
            return HostToolchain(found)
        reasons.append(found)
    raise ToolchainMissing(f"no C++ compiler for host kernels ({'; '.join(reasons)}). {_INSTALL}")


def survey(cxx: str | None = None) -> Iterator[Compiler | str]:
    """Each place where a compiler may be, best first: the compiler, or one line saying why there is none.
    With `cxx` (JITATTN_CXX's text) there is one place: what a user chose is not silently replaced."""
    if cxx is not None:
        yield _looked_at(f"JITATTN_CXX={cxx!r}", _words(cxx))
        return
    for name in _NAMES:
        path = shutil.which(name)
        yield _looked_at(name, [path] if path else [])
    spec = importlib.util.find_spec("ziglang")  # a folder that holds a program: nothing in it is imported
    zig = Path(spec.origin or "").with_name("zig.exe" if os.name == "nt" else "zig") if spec else None
    yield _looked_at("ziglang", [str(zig), "cc"] if zig and zig.is_file() else [])


def _words(cxx: str) -> list[str]:
    if os.name == "nt":  # a backslash is a part of a path there
        return [word.strip('"') for word in shlex.split(cxx, posix=False)]
    try:
        return shlex.split(cxx)
    except ValueError:  # a quotation mark without its other half
        return [cxx]


def _looked_at(name: str, words: Sequence[str]) -> Compiler | str:
    if not words:
        return f"{name}: not found"
    try:
        return probe(words)
    except ToolchainMissing as error:
        return f"{name}: {error}"


def probe(words: Sequence[str]) -> Compiler:
    """Run a compiler's command line to learn which one it is.

    :raises ToolchainMissing: it does not run, is not one of the three kinds, or is too old.
    """
    # The compiler's own options begin at the first dash, but for that of "python -m ziglang cc".
    dashes = [i for i, word in enumerate(words) if i and word.startswith("-") and word != "-m"]
    first = dashes[0] if dashes else len(words)
    # A relative path would be looked for in the folder of each compile.
    path = os.path.abspath(words[0]) if os.path.dirname(words[0]) else words[0]
    program, options = (path, *words[1:first]), tuple(words[first:])
    compiler = _asked(program, options)
    if compiler.major < _OLDEST[compiler.kind]:
        raise ToolchainMissing(f"{compiler.version} is older than {compiler.kind} {_OLDEST[compiler.kind]}")
    if "msvc" in compiler.triple:
        raise ToolchainMissing(f"{compiler.version} is set up for Microsoft's linker and libraries")
    return compiler


def _asked(program: tuple[str, ...], options: tuple[str, ...]) -> Compiler:
    if any(PurePath(word).stem in ("zig", "ziglang") for word in program):
        words = program[:-1] if program[-1] in ("cc", "c++") else program
        status, said = _run([*words, "version"])
        version = said.strip()
        if status or not re.fullmatch(r"\d+\.\d+\.\S+", version):
            raise ToolchainMissing(f"'zig version' said {version[:200]!r}")
        return Compiler((*words, "cc"), options, "zig", 0, f"zig {version}", _zig_triple())
    if sys.platform == "darwin" and os.path.dirname(program[0]) == "/usr/bin":
        # Without the command line tools these are stubs that open a dialog.
        status, _ = _run(["xcode-select", "-p"])
        if status:
            raise ToolchainMissing("the command line tools are not installed")
    _, said = _run([*program, *options, "-v"])
    triple = re.search(r"^Target: (\S+)", said, re.MULTILINE)
    gcc = re.search(r"^gcc version ((\d+).*?)\s*$", said, re.MULTILINE)
    clang = re.search(r"^(.*clang version (\d+).*?)\s*$", said, re.MULTILINE)
    if triple and clang:
        major = int(clang[2]) - (2 if clang[1].startswith("Apple") else 0)
        return Compiler(program, options, "clang", major, clang[1], triple[1])
    if triple and gcc:
        return Compiler(program, options, "gcc", int(gcc[2]), f"gcc {gcc[1]}", triple[1])
    raise ToolchainMissing(f"neither GCC nor Clang nor Zig: with -v it said {said.strip()[:200]!r}")


def _zig_triple() -> str:
    """What Zig is told to make code for: left alone, it would name this machine's kernel and C library."""
    # On Windows the process may be emulated, and platform.machine() names the machine below the emulator.
    machine = sysconfig.get_platform().rpartition("-")[2] if sys.platform == "win32" else platform.machine()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    if sys.platform == "darwin":
        return f"{machine}-macos"
    if sys.platform == "win32":
        return f"{machine}-windows-gnu"
    is_glibc = "CS_GNU_LIBC_VERSION" in os.confstr_names
    # 2.28 is what PyTorch's own wheels need at least.
    return f"{machine}-linux-gnu.2.28" if is_glibc else f"{machine}-linux-musl"


# Zig would first build the C runtime of a Windows library, for over a minute. All that a kernel needs of it is
# an entry point and the mark that floating point is in use.
_WINDOWS_ENTRY = """\
extern "C" {
int _fltused = 0;
int __stdcall DllMainCRTStartup(void*, unsigned, void*) { return 1; }
}
"""


def _links(compiler: Compiler) -> tuple[_Link, ...]:
    """How this compiler links a kernel. A second way is tried when the first lacks a symbol."""
    system = compiler.system
    position = () if system == "win32" else ("-fPIC",)
    if compiler.kind == "zig":
        # By default Zig adds debug information, with the folder's path in it. Without -nostdlib it first
        # builds its run-time library, for 5 s, and a kernel hardly ever needs anything of it.
        common = ("-target", compiler.triple, *position, "-g0")
        if system == "win32":
            return _Link((*common, "-nostdlib"), ("entry.cpp", "-lucrtbase")), _Link((*common, "-nostdlib++"))
        strict = ("-Wl,--no-undefined",) if system == "linux" else ()
        return tuple(_Link((*common, *strict, bare), ("-lm",)) for bare in ("-nostdlib", "-nostdlib++"))
    # GCC's C++ driver names libstdc++; unused, it must not become a dependency.
    bare = ("-nostdlib++",) if compiler.kind == "clang" else ()
    if system == "win32":
        # GCC does not align the frames that it saves AVX registers in: https://gcc.gnu.org/PR54412.
        safe = ("-Wa,-muse-unaligned-vector-move", "-static") if compiler.kind == "gcc" else ()
        return (_Link((*bare, *safe)),)
    if system == "linux":
        bare = (*bare, "-pipe", "-Wl,--as-needed", "-Wl,--no-undefined")
    return (_Link((*position, *bare), ("-lm",)),)


def _spelled(flags: tuple[str, ...], compiler: Compiler) -> tuple[str, ...]:
    """A target's flags in this compiler's words."""
    if compiler.kind == "zig":
        # Said even when no flag asks for it: Zig's default is this machine's own processor.
        cpu = next((_ZIG_CPUS[flag] for flag in flags if flag in _ZIG_CPUS), "baseline")
        features = [flag for flag in flags if flag.startswith("-m") and "=" not in flag]
        rest = [flag for flag in flags if flag not in _ZIG_CPUS and flag not in features]
        return ("+".join((f"-mcpu={cpu}", *(flag[2:] for flag in features))), *rest)
    if compiler.major < _LEVELS_SINCE[compiler.kind]:
        return tuple(word for flag in flags for word in _LEVELS.get(flag, (flag,)))
    return flags


def _zig_folders(folder: Path) -> dict[str, str]:
    """Zig keeps every result for ever in one folder and the few libraries that it builds in another: only the
    second is worth keeping."""
    kept = settings.current().cache_dir.absolute() / "zig"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        kept = folder / "libraries"
    return {"ZIG_LOCAL_CACHE_DIR": str(folder / "results"), "ZIG_GLOBAL_CACHE_DIR": str(kept)}


def _run(command: Sequence[str], folder: Path | None = None, **environment: str) -> tuple[int, str]:
    """Exit status and all that the command printed, in English.

    :raises ToolchainMissing: it cannot be started.
    """
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except OSError as error:
        raise ToolchainMissing(f"{command[0]} cannot be run: {error.strerror or error}") from error
    return result.returncode, result.stdout


def _advice(log: str) -> str:
    if not re.search("unrecognized command|unknown argument|bad value|unknown target CPU|no such instruction", log):
        return ""
    return (
        ": it, or its assembler, is older than this instruction set. Take a newer one (pip install 'jitattn[cpu]' "
        "and JITATTN_CXX='python -m ziglang cc'), or less with JITATTN_HOST_ISA=x86-64-v3"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def listing(binary: bytes) -> str:
    """The machine code as text, or a line that says which tool would show it."""
    with tempfile.TemporaryDirectory(prefix="jitattn-") as name:
        folder = Path(name)
        (folder / "kernel").write_bytes(binary)
        for tool in filter(None, map(shutil.which, ("objdump", "llvm-objdump"))):
            status, said = _run([tool, "-d", "-C", "--no-show-raw-insn", "kernel"], folder)
            if status == 0:
                return said
    return "no disassembler for this binary here: objdump (binutils) or llvm-objdump (LLVM) would list it"
