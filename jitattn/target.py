"""What a kernel is compiled for: a vendor, an instruction set and the source folders that serve it.

Nothing here runs a compiler or loads a library, and ``parse`` needs no machine of the kind it names, so a
build box can compile for another.

    >>> str(parse("host:x86-64-v3"))
    'host:x86-64-v3'
    >>> parse("host:x86-64-v3").vector_bytes
    32
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from . import settings
from .errors import JitattnError, Unsupported

__all__ = ["HOST_ARCHS", "Target", "detect", "host", "parse"]

Vendor = Literal["host", "cuda", "hip"]


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture to compile for. ``str(target)`` is a name that ``parse`` reads back."""

    vendor: Vendor
    arch: str
    overlay: tuple[str, ...]
    """Include folders below kernel_src, nearest first: a file in an earlier one hides its namesakes."""
    compile_flags: tuple[str, ...]
    """The instruction set in GCC's and Clang's current spelling; a toolchain may translate it. Never "native":
    these words are in the text that a kernel's key is computed from."""
    vector_bytes: int
    """Width of the vector registers that kernels are written for."""
    bf16_dot: bool
    """Whether the machine multiplies pairs of bfloat16 into float32 in one instruction."""
    units: int
    """Cores that this process may use; it sizes launches and is never compiled in."""

    def __str__(self) -> str:
        return f"{self.vendor}:{self.arch}"


class _HostArch(NamedTuple):
    """A row of HOST_ARCHS."""

    machine: str
    """Which processors it runs on: "x86", "arm" or, for any, ""."""
    needs: frozenset[str]
    """Processor features by their Linux names, beyond those that every such processor has."""
    compile_flags: tuple[str, ...]
    vector_bytes: int
    bf16_dot: bool = False


_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# Left alone, compilers keep the loops that they vectorise to 256 bits, for the sake of the first processors with
# AVX-512. Kernels use whole registers all through, so there is nothing left to save.
_V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")

# Weakest first among those of one processor: the machine's own is the last whose needs are met.
HOST_ARCHS: dict[str, _HostArch] = {
    "generic": _HostArch("", frozenset(), (), 16),
    "x86-64": _HostArch("x86", frozenset(), ("-march=x86-64",), 16),
    "x86-64-v3": _HostArch("x86", _V3, ("-march=x86-64-v3",), 32),
    "x86-64-v4": _HostArch("x86", _V4, _V4_FLAGS, 64),
    "x86-64-v4+bf16": _HostArch("x86", _V4 | {"avx512_bf16"}, (*_V4_FLAGS, "-mavx512bf16"), 64, True),
    "aarch64": _HostArch("arm", frozenset(), ("-march=armv8-a",), 16),
}


def parse(text: str) -> Target:
    """The target of a name: "host" (this machine) or "host:ARCH" with an ARCH of HOST_ARCHS.

    :raises Unsupported: no such target in this version; the message lists those that exist.
    """
    vendor, _, arch = text.strip().partition(":")
    read = _VENDORS.get(vendor)
    if read is None:
        raise Unsupported(f"no target {text!r} in this version; {_existing()}")
    return read(arch)


def detect(device_type: str) -> Target:
    """The target of a torch device type on this machine.

    :raises Unsupported: kernels for that kind of device do not exist in this version.
    """
    if device_type != "cpu":
        raise Unsupported(f"no target for {device_type!r} tensors in this version: move them to the cpu")
    return host()


def host() -> Target:
    """This machine, or the weaker instruction set that JITATTN_HOST_ISA asks for.

    :raises JitattnError: JITATTN_HOST_ISA names something unknown, or more than this machine has.
    """
    wanted = settings.current().host_isa
    return _host(_machine_arch() if wanted is None else _allowed(wanted))


def _parse_host(arch: str) -> Target:
    if not arch:
        return host()
    if arch not in HOST_ARCHS:
        raise Unsupported(f"no target 'host:{arch}' in this version; {_existing()}")
    return _host(arch)


# Vendor -> reader of what follows "vendor:". A new vendor is a row here, a table of its architectures and a
# line in detect.
_VENDORS: dict[str, Callable[[str], Target]] = {"host": _parse_host}


def _existing() -> str:
    return "there are host, " + ", ".join(f"host:{arch}" for arch in HOST_ARCHS)


@functools.cache
def _host(arch: str) -> Target:
    row = HOST_ARCHS[arch]
    return Target(
        vendor="host",
        arch=arch,
        overlay=("arch/host", "."),
        compile_flags=row.compile_flags,
        vector_bytes=row.vector_bytes,
        bf16_dot=row.bf16_dot,
        units=_cores(),
    )


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))  # a container or taskset may allow fewer than there are
    return os.cpu_count() or 1


def _allowed(arch: str) -> str:
    """`arch` itself, if this machine can run it."""
    row = HOST_ARCHS.get(arch)
    if row is None:
        raise JitattnError(f"JITATTN_HOST_ISA={arch!r}: choose one of {', '.join(HOST_ARCHS)}")
    if not _runs(row):
        missing = ", ".join(sorted(row.needs - _features())) or f"another processor than {_processor()!r}"
        raise JitattnError(
            f"JITATTN_HOST_ISA={arch!r} is more than this machine has: it is {_machine_arch()!r}, and "
            f"{arch!r} needs {missing}"
        )
    return arch


@functools.cache
def _machine_arch() -> str:
    return [name for name, row in HOST_ARCHS.items() if _runs(row)][-1]


def _runs(row: _HostArch) -> bool:
    return row.machine in ("", _processor()) and row.needs <= _features()


@functools.cache
def _processor() -> str:
    """ "x86" or "arm" when this process is 64-bit code for one, else ""."""
    if sys.maxsize < 2**32:
        return ""
    # On Windows the process may be emulated, and platform.machine() names the machine below the emulator.
    machine = sysconfig.get_platform() if sys.platform == "win32" else platform.machine()
    machine = machine.lower().removeprefix("win-")
    return {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}.get(machine, "")


@functools.cache
def _features() -> frozenset[str]:
    """What processor and operating system both support, by Linux names; empty where that is unknown."""
    if _processor() != "x86":
        return frozenset()
    if sys.platform == "linux":
        return _linux_features(Path("/proc/cpuinfo"))
    if sys.platform == "darwin":
        return _mac_features()
    if sys.platform == "win32":
        return _windows_features()
    return frozenset()


def _linux_features(cpuinfo: Path) -> frozenset[str]:
    # The kernel lists a vector extension only when it also saves its registers.
    try:
        with cpuinfo.open() as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())


def _mac_features() -> frozenset[str]:
    # Each is asked for, and so Rosetta, which has only some of them, answers for itself.
    keys = {name: name for name in _V4} | {"avx2": "avx2_0"}
    found = {name for name, key in keys.items() if _mac_has(f"hw.optional.{key}")}
    # No key names these two; every Mac with AVX2 has them.
    return frozenset(found | {"abm", "movbe"} if "avx2" in found else found)


def _mac_has(key: str) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    ask = ctypes.CDLL(None).sysctlbyname
    status = ask(key.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return status == 0 and value.value > 0


def _windows_features() -> frozenset[str]:
    # Windows names only these two. Every processor that it runs on with AVX2 has the rest of x86-64-v3, every
    # one with AVX-512 the rest of x86-64-v4.
    present = ctypes.windll.kernel32.IsProcessorFeaturePresent  # type: ignore[attr-defined]
    avx2, avx512f = 40, 41
    if not present(avx2):
        return frozenset()
    return _V4 if present(avx512f) else _V3
