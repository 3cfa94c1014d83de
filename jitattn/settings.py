"""Every environment variable that jitattn reads, in one table.

``current()`` reads the environment afresh at each call, so a test or a notebook may change a variable at
any time. Nothing here touches a disk beyond asking, once, whether the package runs from a checkout.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from .errors import JitattnError

__all__ = ["VARIABLES", "Settings", "Variable", "current"]

LOG_LEVELS = ("quiet", "info", "debug")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks for. VARIABLES below says what each field means."""

    cache_dir: Path
    cache_bytes: int
    cache_wait: float
    log: str
    cxx: str | None
    host_isa: str | None
    nvrtc: Path | None
    cuda_arch: str | None
    line_info: bool
    override: Path | None
    compile_limit: int


class Variable(NamedTuple):
    """One environment variable: the Settings field it fills, how its text is read, what it means."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Callable[[], Any]
    shown_default: str
    meaning: str


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """'1073741824', '512M', '1.5GiB' (powers of 1024 in every spelling) -> bytes, at least 1."""
    bare = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = bare[-1:] if bare[-1:] in "kmgt" else ""
    size = int(float(bare.removesuffix(unit)) * _UNITS[unit])
    if size < 1:
        raise ValueError("a size must be positive")
    return size


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError("a time must be finite and not negative")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError("a count must not be negative")
    return count


def _switch(text: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise ValueError("choose 0 or 1")
    return text.strip() == "1"


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _log_level(text: str) -> str:
    level = text.strip().lower()
    if level not in LOG_LEVELS:
        raise ValueError(f"choose one of {', '.join(LOG_LEVELS)}")
    return level


@functools.cache
def _checkout_cache() -> Path | None:
    """The cache/ folder of a source checkout, None for an installed package.

    A checkout's cache/ carries a README: a stray pyproject.toml in site-packages is not enough.
    """
    root = Path(__file__).resolve().parent.parent
    is_checkout = (root / "pyproject.toml").is_file() and (root / "cache" / "README.md").is_file()
    return root / "cache" if is_checkout else None


def user_cache_dir() -> Path:
    """The platform's folder for caches of this user, with jitattn's name added; nothing is created."""
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG rules say to ignore a relative path.
        base = xdg if os.path.isabs(xdg) else home / ".cache"
    return Path(base) / "jitattn"


def _default_cache_dir() -> Path:
    return _checkout_cache() or user_cache_dir()


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "JITATTN_CACHE_DIR", "cache_dir", _path, _default_cache_dir,
        "the user's cache folder (a checkout: its cache/)",
        "Folder that keeps compiled kernels between runs.",
    ),
    Variable(
        "JITATTN_CACHE_SIZE", "cache_bytes", parse_bytes, lambda: 1 << 30, "1G",
        "Bound on that folder's size; the least recently used kernels are dropped first.",
    ),
    Variable(
        "JITATTN_CACHE_WAIT", "cache_wait", _seconds, lambda: 60.0, "60",
        "Seconds to wait for another process that compiles the same kernel before compiling it too.",
    ),
    Variable(
        "JITATTN_LOG", "log", _log_level, lambda: "info", "info",
        "How much is said on stderr: quiet, info (what is being compiled) or debug.",
    ),
    Variable(
        "JITATTN_CXX", "cxx", str, lambda: None, "the first of c++, g++, clang++, ziglang",
        "C++ compiler for the host architecture, a command or a path, with arguments if need be.",
    ),
    Variable(
        "JITATTN_HOST_ISA", "host_isa", str, lambda: None, "this machine's own",
        "Instruction set of host kernels, such as x86-64-v3.",
    ),
    Variable(
        "JITATTN_NVRTC", "nvrtc", _path, lambda: None, "that of a pip package, else the system's",
        "NVRTC library that compiles CUDA kernels, a path.",
    ),
    Variable(
        "JITATTN_CUDA_ARCH", "cuda_arch", str, lambda: None, "the GPU's own",
        "Architecture of CUDA kernels, such as sm_80, for GPUs that are newer.",
    ),
    Variable(
        "JITATTN_LINE_INFO", "line_info", _switch, lambda: False, "0",
        "1: CUDA kernels carry the line numbers of kernel_src for profilers, and take longer to compile and to load.",
    ),
    Variable(
        "JITATTN_OVERRIDE", "override", _path, lambda: None, "unset",
        "Folder of edited kernel sources, each named by the digest it replaces.",
    ),
    Variable(
        "JITATTN_COMPILE_LIMIT", "compile_limit", _count, lambda: 64, "64",
        "Compiles in one process beyond which a warning says that something varies that should not.",
    ),
)  # fmt: skip


_NAMES = tuple(variable.name for variable in VARIABLES)
# The default cache folder follows from these: a change of one must be seen as well.
_SYSTEM_NAMES = ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME", "USERPROFILE")


def current() -> Settings:
    """The settings of this moment. An unset or empty variable means its default.

    :raises JitattnError: a variable's text cannot be read; the message names the variable.
    """
    environ = os.environ
    return _parsed(tuple(environ.get(name) for name in _NAMES + _SYSTEM_NAMES))


@functools.lru_cache(maxsize=64)
def _parsed(texts: tuple[str | None, ...]) -> Settings:
    """Settings from the variables' texts, in the order of VARIABLES; those that follow only key the memo."""
    pairs = zip(VARIABLES, texts, strict=False)
    return Settings(**{variable.field: _read(variable, text) for variable, text in pairs})


def _read(variable: Variable, text: str | None) -> Any:
    if not text:
        return variable.default()
    try:
        return variable.parse(text)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise JitattnError(f"{variable.name}={text!r}: {error}") from None


assert [variable.field for variable in VARIABLES] == [field.name for field in fields(Settings)]
