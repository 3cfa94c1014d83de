"""Targets: names, flags, what a machine is found to have."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jitattn import source, target
from jitattn.errors import JitattnError, Unsupported


@pytest.mark.parametrize("arch", target.HOST_ARCHS)
def test_names_are_read_back(arch: str) -> None:
    parsed = target.parse(f"host:{arch}")
    assert parsed.arch == arch
    assert target.parse(str(parsed)) == parsed
    assert hash(target.parse(str(parsed))) == hash(parsed)


@pytest.mark.parametrize("arch", target.HOST_ARCHS)
def test_flags_never_depend_on_this_machine(arch: str) -> None:
    parsed = target.parse(f"host:{arch}")
    assert not any("native" in flag for flag in parsed.compile_flags)
    assert parsed.overlay == ("arch/host", ".")
    assert parsed.units >= 1


def test_archs_differ_in_what_a_compiler_is_told() -> None:
    flags = [target.parse(f"host:{arch}").compile_flags for arch in target.HOST_ARCHS]
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(
    ("arch", "vector_bytes", "bf16_dot"),
    [
        ("x86-64-v4+bf16", 64, True),
        ("x86-64-v4", 64, False),
        ("x86-64-v3", 32, False),
        ("x86-64", 16, False),
        ("aarch64", 16, False),
        ("generic", 16, False),
    ],
)
def test_registers(arch: str, vector_bytes: int, bf16_dot: bool) -> None:
    parsed = target.parse(f"host:{arch}")
    assert (parsed.vector_bytes, parsed.bf16_dot) == (vector_bytes, bf16_dot)


@pytest.mark.parametrize("text", ["sm_99", "gfx942", "host:x86-64-v9", "cuda:sm_8", "cuda", "cuda:", "sm_80:a", ""])
def test_unknown_targets_say_which_exist(text: str) -> None:
    with pytest.raises(Unsupported, match="host:x86-64-v3.*cuda:sm_90a"):
        target.parse(text)


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITATTN_HOST_ISA", raising=False)
    assert target.host() == target.parse("host") == target.detect("cpu")
    assert target.host().arch in target.HOST_ARCHS


def test_other_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match="mps.*CUDA"):
        target.detect("mps")


def test_a_weaker_instruction_set_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_HOST_ISA", "generic")
    assert target.host().arch == target.parse("host").arch == "generic"


def test_an_unknown_instruction_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_HOST_ISA", "sse9")
    with pytest.raises(JitattnError, match="JITATTN_HOST_ISA.*x86-64-v3"):
        target.host()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be a machine: machine(processor, features)."""

    def pretend(processor: str, features: frozenset[str]) -> None:
        monkeypatch.setattr(target, "_processor", lambda: processor)
        monkeypatch.setattr(target, "_features", lambda: features)
        target._machine_arch.cache_clear()

    yield pretend
    monkeypatch.undo()
    target._machine_arch.cache_clear()


V3 = frozenset({"sse2", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("processor", "features", "arch"),
    [
        ("x86", frozenset({"sse2"}), "x86-64"),
        ("x86", V3 - {"f16c"}, "x86-64"),
        ("x86", V3, "x86-64-v3"),
        ("x86", V3 | {"avx512f"}, "x86-64-v3"),
        ("x86", V4, "x86-64-v4"),
        ("x86", V4 | {"avx512_bf16"}, "x86-64-v4+bf16"),
        ("arm", frozenset(), "aarch64"),
        ("", frozenset(), "generic"),
    ],
)
def test_the_strongest_that_a_machine_runs(
    machine, monkeypatch: pytest.MonkeyPatch, processor: str, features: frozenset[str], arch: str
) -> None:
    monkeypatch.delenv("JITATTN_HOST_ISA", raising=False)
    machine(processor, features)
    assert target.host().arch == arch


@pytest.mark.parametrize(
    ("processor", "features", "wanted", "reason"),
    [
        ("x86", V3, "x86-64-v4", "avx512f"),
        ("x86", V4, "x86-64-v4+bf16", "avx512_bf16"),
        ("x86", V4, "aarch64", "another processor"),
        ("arm", frozenset(), "x86-64", "another processor"),
    ],
)
def test_more_than_the_machine_has_is_an_error(
    machine,
    monkeypatch: pytest.MonkeyPatch,
    processor: str,
    features: frozenset[str],
    wanted: str,
    reason: str,
) -> None:
    machine(processor, features)
    monkeypatch.setenv("JITATTN_HOST_ISA", wanted)
    with pytest.raises(JitattnError, match=f"more than this machine has.*{reason}"):
        target.host()


def test_another_machine_may_be_compiled_for(machine) -> None:
    machine("arm", frozenset())
    assert target.parse("host:x86-64-v4+bf16").bf16_dot


def test_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert target._linux_features(cpuinfo) == {"fpu", "avx2", "fma"}
    assert target._linux_features(tmp_path / "missing") == frozenset()


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is read on Linux")
def test_units_are_the_cores_that_this_process_may_use() -> None:
    core = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {{{core}}}); from jitattn import target; print(target.host().units)"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True).stdout == "1\n"


# GPUs: which code runs on which follows from the compute capability alone.


@pytest.mark.parametrize("arch", [*target.CUDA_ARCHS, *(name.replace("sm_", "compute_") for name in target.CUDA_ARCHS)])
def test_cuda_names_are_read_back(arch: str) -> None:
    parsed = target.parse(arch)
    assert str(parsed) == f"cuda:{arch}" and target.parse(str(parsed)) == parsed
    assert parsed.compile_flags == (f"--gpu-architecture={arch}",)
    assert parsed.overlay[-3:] == ("arch/cuda", "arch/gpu", ".") and parsed.units > 0
    assert parsed.bf16_dot == (parsed.table != "sm_75")
    folders = [source.kernel_src() / folder for folder in parsed.overlay]
    assert all(folder.is_dir() for folder in folders), "a folder of kernel_src is missing"


def test_ptx_of_a_target() -> None:
    assert target.portable(target.parse("sm_80")) == target.parse("compute_80")
    assert target.portable(target.parse("compute_80")) == target.parse("compute_80")
    with pytest.raises(Unsupported, match="host:generic has no PTX"):
        target.portable(target.parse("host:generic"))


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 0), "sm_70"),
        ((7, 2), "sm_70"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 8), "sm_86"),  # what does not exist yet runs an older one's code of the same major version
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((9, 5), "sm_90"),
        ((10, 0), "sm_100a"),
        ((10, 1), "compute_90"),  # code with an "a" runs nowhere else, nor does another major version's
        ((10, 3), "sm_103a"),
        ((11, 0), "sm_110a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
        ((15, 0), "compute_90"),
    ],
)
def test_what_a_gpu_gets(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    monkeypatch.delenv("JITATTN_CUDA_ARCH", raising=False)
    found = target.detect("cuda", capability, 7)
    assert found.arch == arch and found.units == 7
    assert replace(found, units=target.parse(arch).units) == target.parse(arch)


@pytest.mark.parametrize("capability", [(0, 0), (5, 2), (6, 1)])
def test_a_gpu_that_is_too_old_says_so(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.delenv("JITATTN_CUDA_ARCH", raising=False)
    with pytest.raises(Unsupported, match="older than 7.0.*SDPA"):
        target.detect("cuda", capability, 10)


@pytest.mark.parametrize(
    ("wanted", "capability", "arch"),
    [
        ("sm_80", (9, 0), "compute_80"),
        ("sm_75", (9, 0), "compute_75"),
        ("sm_80", (8, 6), "sm_80"),
        ("compute_80", (8, 0), "compute_80"),
        ("sm_90", (9, 0), "sm_90"),
        ("sm_90a", (9, 0), "sm_90a"),
    ],
)
def test_an_older_architecture_may_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, wanted: str, capability: tuple[int, int], arch: str
) -> None:
    monkeypatch.setenv("JITATTN_CUDA_ARCH", wanted)
    assert target.detect("cuda", capability, 10).arch == arch


@pytest.mark.parametrize(
    ("wanted", "capability", "reason"),
    [
        ("sm_90", (8, 0), "does not run on a GPU of 8.0"),
        ("sm_90a", (10, 0), "does not run on a GPU of 10.0"),
        ("sm_87", (8, 9), "does not run on a GPU of 8.9"),
        ("sm_42", (8, 0), "choose one of sm_70"),
    ],
)
def test_what_a_gpu_does_not_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, wanted: str, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setenv("JITATTN_CUDA_ARCH", wanted)
    with pytest.raises(JitattnError, match=f"JITATTN_CUDA_ARCH.*{reason}"):
        target.detect("cuda", capability, 10)
