"""What a kernel is compiled for: a vendor, an instruction set and the source folders that serve it.

Nothing here runs a compiler or loads a library, and ``parse`` needs no machine of the kind it names, so a
build box can compile for another.

    >>> str(parse("host:x86-64-v3"))
    'host:x86-64-v3'
    >>> parse("host:x86-64-v3").vector_bytes
    32
    >>> parse("sm_90a").compile_flags
    ('--gpu-architecture=sm_90a',)
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from . import settings
from .errors import JitattnError, Unsupported

__all__ = ["CUDA_ARCHS", "HOST_ARCHS", "Target", "cores", "cuda", "detect", "host", "parse", "portable"]

Vendor = Literal["host", "cuda", "hip"]


@dataclass(frozen=True, slots=True)
class Target:
    """One architecture to compile for. ``str(target)`` is a name that ``parse`` reads back."""

    vendor: Vendor
    arch: str
    overlay: tuple[str, ...]
    """Include folders below kernel_src, nearest first: a file in an earlier one hides its namesakes."""
    table: str
    """The file of tables/ that has its tile shapes."""
    compile_flags: tuple[str, ...]
    """The instruction set: of the host in GCC's and Clang's current spelling, which a toolchain may translate. Never
    "native": these words are in the text that a kernel's key is computed from."""
    vector_bytes: int
    """Width of the vector registers that kernels are written for; of a GPU, what a thread loads at once at the most."""
    bf16_dot: bool
    """Whether the machine multiplies bfloat16 into float32 in one instruction."""
    units: int
    """Cores that this process may use, or a GPU's multiprocessors; it sizes launches and is never compiled in."""
    shared_bytes: int = 0
    """Shared memory that one block of a GPU's threads may have."""

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


class _CudaArch(NamedTuple):
    """A row of CUDA_ARCHS."""

    capability: tuple[int, int]
    folders: tuple[str, ...]
    """Of kernel_src/arch, nearest first, before those that all have."""
    table: str
    shared_kib: int
    """Shared memory that one block may have; the multiprocessor has at most 1 KiB more."""
    units: int
    """Multiprocessors of a usual GPU of this kind, for plans where there is none to ask."""
    alone: bool = False
    """Whether code for it runs on no other GPU: an "a" in the name, or a system on a chip."""


_SM75, _SM80, _SM90 = ("sm75", "sm80"), ("sm80",), ("sm90", "sm80")

# Oldest first; of two rows with one capability a GPU gets the later.
CUDA_ARCHS: dict[str, _CudaArch] = {
    "sm_70": _CudaArch((7, 0), ("sm70", *_SM75), "sm_75", 96, 80),
    "sm_75": _CudaArch((7, 5), _SM75, "sm_75", 64, 40),
    "sm_80": _CudaArch((8, 0), _SM80, "sm_80", 163, 108),
    "sm_86": _CudaArch((8, 6), _SM80, "sm_86", 99, 84),
    "sm_87": _CudaArch((8, 7), _SM80, "sm_80", 163, 16, True),
    "sm_89": _CudaArch((8, 9), _SM80, "sm_86", 99, 128),
    "sm_90": _CudaArch((9, 0), _SM90, "sm_90", 227, 132),
    "sm_90a": _CudaArch((9, 0), _SM90, "sm_90a", 227, 132, True),
    "sm_100a": _CudaArch((10, 0), _SM80, "sm_90", 227, 148, True),
    "sm_103a": _CudaArch((10, 3), _SM80, "sm_90", 227, 148, True),
    "sm_110a": _CudaArch((11, 0), _SM80, "sm_90", 227, 20, True),
    "sm_120a": _CudaArch((12, 0), _SM80, "sm_86", 99, 170, True),
    "sm_121a": _CudaArch((12, 1), _SM80, "sm_86", 99, 48, True),
}


def parse(text: str) -> Target:
    """The target of a name: "host" (this machine), "host:ARCH" with an ARCH of HOST_ARCHS, or "cuda:ARCH" with one of
    CUDA_ARCHS, where "compute_80" in place of "sm_80" stands for PTX, which newer GPUs compile for themselves as they
    load it. "cuda:" may be left out.

    :raises Unsupported: no such target in this version; the message lists those that exist.
    """
    vendor, _, arch = text.strip().partition(":")
    if vendor.startswith(("sm_", "compute_")) and not arch:
        vendor, arch = "cuda", vendor
    read = _VENDORS.get(vendor)
    if read is None:
        raise Unsupported(f"no target {text!r} in this version; {_existing()}")
    return read(arch)


def detect(device_type: str, capability: tuple[int, int] = (0, 0), units: int = 0) -> Target:
    """The target of a torch device type on this machine; of a GPU its compute capability and multiprocessors are given.

    :raises Unsupported: kernels for that kind of device do not exist in this version.
    """
    if device_type == "cpu":
        return host()
    if device_type == "cuda":
        return cuda(capability, units)
    raise Unsupported(f"no target for {device_type!r} tensors in this version: move them to the cpu or a CUDA device")


def cuda(capability: tuple[int, int], units: int) -> Target:
    """A GPU of that capability, or the older architecture that JITATTN_CUDA_ARCH asks for.

    :raises Unsupported: the GPU is older than any that kernels are written for.
    :raises JitattnError: JITATTN_CUDA_ARCH names something unknown, or what the GPU does not run.
    """
    wanted = settings.current().cuda_arch
    arch = _cuda_arch(capability) if wanted is None else _cuda_allowed(wanted, capability)
    return replace(_cuda(arch), units=units)


def host() -> Target:
    """This machine, or the weaker instruction set that JITATTN_HOST_ISA asks for.

    :raises JitattnError: JITATTN_HOST_ISA names something unknown, or more than this machine has.
    """
    wanted = settings.current().host_isa
    return _host(_machine_arch() if wanted is None else _allowed(wanted))


def portable(target: Target) -> Target:
    """The same architecture of a GPU as PTX.

    :raises Unsupported: the target is no CUDA GPU.
    """
    if target.vendor != "cuda":
        raise Unsupported(f"{target} has no PTX: name a CUDA architecture, such as sm_90")
    return replace(_cuda(_as_ptx(target.arch)), units=target.units)


def _parse_host(arch: str) -> Target:
    if not arch:
        return host()
    if arch not in HOST_ARCHS:
        raise Unsupported(f"no target 'host:{arch}' in this version; {_existing()}")
    return _host(arch)


def _parse_cuda(arch: str) -> Target:
    if _row_name(arch) not in CUDA_ARCHS:
        raise Unsupported(f"no target 'cuda:{arch}' in this version; {_existing()}")
    return _cuda(arch)


# Vendor -> reader of what follows "vendor:". A new vendor is a row here, a table of its architectures and a
# line in detect.
_VENDORS: dict[str, Callable[[str], Target]] = {"host": _parse_host, "cuda": _parse_cuda}


def _existing() -> str:
    names = [f"host:{arch}" for arch in HOST_ARCHS] + [f"cuda:{arch}" for arch in CUDA_ARCHS]
    return "there are host, " + ", ".join(names)


@functools.cache
def _cuda(arch: str) -> Target:
    row = CUDA_ARCHS[_row_name(arch)]
    return Target(
        vendor="cuda",
        arch=arch,
        overlay=(*(f"arch/{folder}" for folder in (*row.folders, "cuda", "gpu")), "."),
        table=row.table,
        compile_flags=(f"--gpu-architecture={arch}",),
        vector_bytes=16,
        bf16_dot=row.capability >= (8, 0),
        units=row.units,
        shared_bytes=row.shared_kib << 10,
    )


def _row_name(arch: str) -> str:
    """The name in CUDA_ARCHS of an architecture, whichever form it is asked for in."""
    return arch.replace("compute_", "sm_")


def _cuda_arch(capability: tuple[int, int]) -> str:
    """The best for a GPU: code that it runs as it is, else the PTX of an older one."""
    exact = [name for name, row in CUDA_ARCHS.items() if row.capability == capability]
    if exact:
        return exact[-1]
    older = [name for name, row in CUDA_ARCHS.items() if row.capability < capability and not row.alone]
    if not older:
        raise Unsupported(
            f"this GPU's compute capability {_dotted(capability)} is older than 7.0, where the matrix instructions "
            f'begin that the kernels are made of: use torch\'s SDPA or backend="reference"'
        )
    return older[-1] if _runs_as_it_is(older[-1], capability) else _as_ptx(older[-1])


def _cuda_allowed(wanted: str, capability: tuple[int, int]) -> str:
    """The architecture that JITATTN_CUDA_ARCH names, in the form that the GPU runs."""
    row = CUDA_ARCHS.get(_row_name(wanted))
    if row is None:
        raise JitattnError(f"JITATTN_CUDA_ARCH={wanted!r}: choose one of {', '.join(CUDA_ARCHS)}")
    if row.capability > capability or (row.alone and row.capability != capability):
        raise JitattnError(f"JITATTN_CUDA_ARCH={wanted!r}: code for it does not run on a GPU of {_dotted(capability)}")
    return wanted if _runs_as_it_is(wanted, capability) else _as_ptx(wanted)


def _runs_as_it_is(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on the same major version, from its own minor version on."""
    row = CUDA_ARCHS[_row_name(arch)]
    return row.capability[0] == capability[0] and row.capability <= capability


def _as_ptx(arch: str) -> str:
    return arch.replace("sm_", "compute_")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@functools.cache
def _host(arch: str) -> Target:
    row = HOST_ARCHS[arch]
    return Target(
        vendor="host",
        arch=arch,
        overlay=("arch/host", "."),
        table="host",
        compile_flags=row.compile_flags,
        vector_bytes=row.vector_bytes,
        bf16_dot=row.bf16_dot,
        units=cores(),
    )


def cores() -> int:
    """Of this machine, as many as this process may use."""
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
