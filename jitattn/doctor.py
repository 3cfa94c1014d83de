"""``jitattn doctor``: what this machine has, what it lacks and the line that brings it, and one real call."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import jitattn

from . import settings, target
from .toolchain import host as host_compiler
from .toolchain import nvrtc

# Beside jitattn's own: what changes the speed of torch or of a kernel.
OTHER_VARIABLES = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")

CPU_EXTRA = 'pip install "jitattn[cpu]"'


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is what to do if something is missing or wrong, else None."""

    label: str
    text: str
    remedy: str | None = None


def findings() -> list[Finding]:
    """What was found, in reading order; nothing is compiled and nothing written but one empty file."""
    return [*_versions(), *_compilers(), *_processor(), *_gpus(), *_cache(), *_environment()]


def check() -> tuple[bool, str]:
    """One small forward and backward on the CPU and on a GPU if there is one, held against float64: whether all passed,
    and a line about each."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    passed, said = zip(*(_check_on(device) for device in devices), strict=True)
    return all(passed), "\n".join(said)


def _check_on(device: str) -> tuple[bool, str]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 67, 64)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(device) for _ in range(4))

    def run(dtype: torch.dtype, backend: str | None) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = jitattn.attention(*inputs, causal=True, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))]

    what = f"attention {shape}, float32, causal, forward and backward on {device}"
    before = jitattn.stats()
    try:
        got = run(torch.float32, None)
    except jitattn.JitattnError as error:
        return False, f"{what}: {error}"
    after = jitattn.stats()
    exact, plain = run(torch.float64, "reference"), run(torch.float32, "reference")
    error, usual = (
        max((x.double() - e).abs().max().item() for x, e in zip(xs, exact, strict=True)) for xs in (got, plain)
    )
    allowed = max(2 * usual, 16 * torch.finfo(torch.float32).eps)
    kernels = ", ".join(f"{after[key] - before[key]} {word}" for key, word in _ORIGINS)
    return error <= allowed, f"{what}: error {error:.1e}, allowed {allowed:.1e} (kernels: {kernels})"


_ORIGINS = (("compiled", "compiled"), ("disk_hits", "from the cache"))


def report(passed: bool, said: str) -> str:
    """The findings and the outcome of ``check`` as text."""
    lines, label = [], ""
    found = findings()
    for finding in found:
        lines.append(f"{finding.label if finding.label != label else '':12}{finding.text}")
        label = finding.label
    lines += ["", *(f"{'missing':12}{f.label}: {f.remedy}" for f in found if f.remedy)]
    lines += [*(f"{'check':12}{line}" for line in said.splitlines()), ""]
    return "\n".join([*lines, "ok" if passed else "NOT OK"])


def as_data(passed: bool, said: str) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "machine": machine(),
        "findings": [asdict(finding) for finding in findings()],
        "check": {"passed": passed, "text": said},
    }


def machine() -> dict[str, Any]:
    """What a measurement on this machine has to be read with: hardware, versions, settings, commit, date."""
    try:
        compiler, arch = str(host_compiler.find().compiler), str(target.host())
    except jitattn.JitattnError as error:
        compiler, arch = str(error), "unknown"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": target.host().units if arch != "unknown" else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "jitattn": jitattn.__version__,
        "commit": _commit(),
        "compiler": compiler,
        "target": arch,
        "environment": _variables(),
    }


def cpu_model() -> str:
    """The processor's name as its maker gives it, or what the platform says."""
    try:
        if sys.platform == "linux":
            with open("/proc/cpuinfo", encoding="utf-8") as file:
                return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, StopIteration, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------------------ the findings


def _versions() -> Iterator[Finding]:
    commit = _commit()
    yield Finding("jitattn", f"{jitattn.__version__}{f', commit {commit}' if commit else ''}, {Path(__file__).parent}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}, {platform.platform()}")
    yield Finding("torch", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _compilers() -> Iterator[Finding]:
    chosen = False
    for found in host_compiler.survey(settings.current().cxx):
        if isinstance(found, str):
            yield Finding("compiler", found)
        else:
            yield Finding("compiler", f"{found}{'' if chosen else '  <- used'}")
            chosen = True
    if not chosen:
        wrong = settings.current().cxx and "unset JITATTN_CXX or name a C++ compiler in it; or "
        yield Finding("compiler", "none will do", f"{wrong or ''}{CPU_EXTRA}")


def _processor() -> Iterator[Finding]:
    try:
        chosen = target.host()
        yield Finding("processor", f"{cpu_model()}, {chosen.units} cores; kernels for {chosen}")
    except jitattn.JitattnError as error:
        yield Finding("processor", f"{cpu_model()}; {error}", "unset JITATTN_HOST_ISA")


def _gpus() -> Iterator[Finding]:
    cuda, hip = torch.version.cuda, torch.version.hip
    count = torch.cuda.device_count()
    for i in range(count):
        properties = torch.cuda.get_device_properties(i)
        gib = f"{properties.total_memory / 2**30:.0f} GiB"
        if hip:
            yield Finding("gpu", f"{properties.name}, {properties.gcnArchName}, {gib}; no kernels in this version")
            continue
        capability = properties.major, properties.minor
        try:
            kernels = f"kernels for {target.detect('cuda', capability)}"
        except jitattn.JitattnError as error:
            kernels = str(error)
        yield Finding("gpu", f"{properties.name}, sm_{properties.major}{properties.minor}, {gib}; {kernels}")
    if not count:
        build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no GPU"
        remedy = None
        if shutil.which("nvidia-smi") and not cuda:
            remedy = "this torch is built without CUDA: pip install torch, from the index that pytorch.org names"
        yield Finding("gpu", f"none that torch can use (this torch is built for {build})", remedy)
    if hip:
        version = _installed("hip-python")
        missing = count and not version
        yield Finding("hip-python", version or "not installed", 'pip install "jitattn[rocm]"' if missing else None)
    else:
        yield from _cuda_libraries(f'pip install "jitattn[{_cuda_extra(cuda)}]"' if count else None)


def _cuda_libraries(remedy: str | None) -> Iterator[Finding]:
    """What compiles for a GPU and what launches; `remedy` is None where there is no GPU that would need them."""
    driver = torch._C._cuda_getDriverVersion() if torch.cuda.is_available() else 0  # type: ignore[attr-defined]
    if driver:
        yield Finding("driver", f"supports CUDA {driver // 1000}.{driver % 1000 // 10}")
    chosen = False
    for found in nvrtc.survey(settings.current().nvrtc):
        if isinstance(found, str):
            yield Finding("nvrtc", found)
            continue
        newer = driver and found.version[:2] > (driver // 1000, driver % 1000 // 10)
        yield Finding(
            "nvrtc",
            f"{found} at {found.path}{'' if chosen else '  <- used'}{', newer than the driver' if newer else ''}",
        )
        chosen = True
    if not chosen:
        yield Finding("nvrtc", "not found", remedy)
    version = next(filter(None, map(_installed, _CUPY)), None)
    if version or importlib.util.find_spec("cupy"):
        yield Finding("cupy", version or "installed")
    else:
        yield Finding("cupy", "not installed", remedy)


_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def _cuda_extra(cuda: str | None) -> str:
    return "cuda12" if cuda and cuda.startswith("12.") else "cuda13"


def _installed(distribution: str) -> str | None:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def _cache() -> Iterator[Finding]:
    info = jitattn.cache.info()
    writable = _writable(info.directory)
    held = f"{info.entries} kernels, {info.size / 2**20:.1f} of {info.max_bytes / 2**20:.0f} MiB"
    remedy = None if writable else "set JITATTN_CACHE_DIR to a folder that can be written"
    yield Finding("cache", f"{info.directory}{'' if writable else ' (cannot be written)'}: {held}", remedy)
    if info.trouble:
        yield Finding("cache", info.trouble, "jitattn cache verify")


def _writable(folder: Path) -> bool:
    """Whether files can be made there, or in the nearest parent that exists: nothing is left behind."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _environment() -> Iterator[Finding]:
    for name, value in _variables().items():
        yield Finding("environment", f"{name}={value}")


def _variables() -> dict[str, str]:
    names = [*(variable.name for variable in settings.VARIABLES), *OTHER_VARIABLES]
    return {name: os.environ[name] for name in names if name in os.environ}


def _commit() -> str | None:
    """The checkout's commit, marked "+" if files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
