"""The host compilers, and loading what they make: every compiler found here is run for real."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jitattn import target, toolchain
from jitattn.errors import CompileError, JitattnError, ToolchainMissing
from jitattn.runtime import host as runtime
from jitattn.toolchain import host
from jitattn.toolchain.host import Compiler, HostToolchain

KERNEL = """
typedef float Value __attribute__((vector_size(BYTES), aligned(4), may_alias));
extern "C" __attribute__((visibility("default"))) void scale_log(float* x, int n, float factor) {
  constexpr int lanes = BYTES / 4;
  for (int i = 0; i < n; i += lanes) *(Value*)(x + i) *= factor;
  for (int i = 0; i < n; ++i) x[i] = __builtin_logf(x[i]);
}
static int calls;
extern "C" __attribute__((visibility("default"))) int count() { return ++calls; }
"""
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
HERE = {"x86": ["x86-64", "x86-64-v3", "x86-64-v4", "x86-64-v4+bf16", "generic"], "arm": ["aarch64", "generic"]}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="about Linux")


@pytest.fixture(scope="session")
def found() -> dict[str, Compiler]:
    """The first compiler of each kind on this machine."""
    compilers = [compiler for compiler in host.survey() if isinstance(compiler, Compiler)]
    return {compiler.kind: compiler for compiler in reversed(compilers)}


@pytest.fixture(params=["gcc", "clang", "zig"])
def tools(request: pytest.FixtureRequest, found: dict[str, Compiler]) -> HostToolchain:
    if request.param not in found:
        pytest.skip(f"no {request.param} here")
    return HostToolchain(found[request.param])


@pytest.fixture
def zig(found: dict[str, Compiler]) -> Compiler:
    if "zig" not in found:
        pytest.skip("no zig here")
    return found["zig"]


def kernel(vector_bytes: int = 16) -> str:
    return KERNEL.replace("BYTES", str(vector_bytes))


def answers(binary: bytes) -> int:
    return runtime.load(binary).answer()


def pretend(path: Path, *lines: str) -> None:
    """Write a program that says these lines, as a compiler asked who it is."""
    path.write_text("\n".join(["#!/bin/sh", *(f"echo {shlex.quote(line)}" for line in lines), ""]))
    path.chmod(0o755)


# Compiling


def test_a_kernel_compiles_loads_and_runs(tools: HostToolchain) -> None:
    here = target.host()
    binary = tools.compile(kernel(here.vector_bytes), here.compile_flags)
    assert binary.log == "" and 0 < binary.seconds < 60
    values = (ctypes.c_float * 32)(*range(1, 33))
    runtime.load(binary.data).scale_log(values, 32, ctypes.c_float(2.0))
    assert values[0] == pytest.approx(0.6931472) and values[31] == pytest.approx(4.1588831)


@pytest.mark.parametrize("arch", target.HOST_ARCHS)
def test_every_instruction_set_of_this_processor(tools: HostToolchain, arch: str) -> None:
    if arch not in HERE.get(target._processor(), []):
        pytest.skip("another processor's")
    wanted = target.parse(f"host:{arch}")
    listing = host.listing(tools.compile(kernel(wanted.vector_bytes), wanted.compile_flags).data)
    if target._processor() == "x86" and "disassembler" not in listing:
        assert ("zmm" in listing) == (wanted.vector_bytes == 64)
        assert ("ymm" in listing or "zmm" in listing) == (wanted.vector_bytes >= 32)


@LINUX
def test_the_binary_needs_nothing_but_libm_and_libc(tools: HostToolchain) -> None:
    if not shutil.which("objdump"):
        pytest.skip("no objdump here")
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(tools.compile(kernel(), ()).data)
        headers = subprocess.run(["objdump", "-p", file.name], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED +(\S+?)\.so", headers)) <= {"libm", "libc"}


def test_equal_text_gives_equal_bytes_without_a_path(tools: HostToolchain) -> None:
    first, second = (tools.compile(kernel(), ()).data for _ in range(2))
    assert first == second
    assert tempfile.gettempdir().encode() + b"/" not in first
    assert str(Path(__file__).parent.parent).encode() not in first


def test_threads_compile_side_by_side(tools: HostToolchain) -> None:
    texts = [ANSWER.replace("return ANSWER", f"return {i}") for i in range(6)]
    with ThreadPoolExecutor(2) as pool:
        binaries = list(pool.map(lambda text: tools.compile(text, ()), texts))
    assert [answers(binary.data) for binary in binaries] == list(range(6))


def test_nothing_is_left_behind(tools: HostToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tools.compile(kernel(), ())
    runtime._load_from_file(tools.compile(kernel(), ()).data, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Refusals


def test_a_refused_source_is_kept_for_reading(
    tools: HostToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        tools.compile('#line 7 "attn/forward.h"\nint f() { return nowhere; }\n', ())
    assert "attn/forward.h:7" in caught.value.log and "nowhere" in str(caught.value)
    path = Path(caught.value.source_path or "")
    assert path.parent == tmp_path / "failed" and "nowhere" in path.read_text()


def test_a_refused_source_is_kept_elsewhere_when_the_cache_is_unwritable(
    tools: HostToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        tools.compile("int f() { return nowhere; }\n", ())
    assert "nowhere" in Path(caught.value.source_path or "").read_text()


def test_a_missing_symbol_is_the_compilers_refusal_not_the_loaders(tools: HostToolchain) -> None:
    with pytest.raises(CompileError, match="undefined.*elsewhere"):
        tools.compile("int elsewhere();\n" + ANSWER.replace("ANSWER", "elsewhere()"), ())


def test_an_unknown_option_says_what_may_help(tools: HostToolchain) -> None:
    if tools.compiler.kind == "zig":
        pytest.skip("what the advice is to take")
    with pytest.raises(CompileError, match="JITATTN_HOST_ISA"):
        tools.compile(kernel(), ("-march=no-such-level",))


def test_a_compiler_that_disappeared() -> None:
    gone = HostToolchain(Compiler(("/no/such/g++",), (), "gcc", 12, "gcc 12.2.0", "x86_64-linux-gnu"))
    with pytest.raises(ToolchainMissing, match="/no/such/g\\+\\+"):
        gone.compile(kernel(), ())


# Identity


def test_identity_is_one_line_with_no_path(tools: HostToolchain) -> None:
    assert tools.identity() == HostToolchain(host.probe(tools.compiler.program)).identity()
    assert "\n" not in tools.identity() and tools.compiler.version in tools.identity()
    assert os.path.dirname(tools.compiler.program[0]) not in tools.identity()


def test_identity_is_the_compilers_not_its_names(tmp_path: Path, found: dict[str, Compiler]) -> None:
    if "gcc" not in found:
        pytest.skip("no gcc here")
    other = tmp_path / "other-name"
    other.write_text(f'#!/bin/sh\nexec {shlex.quote(found["gcc"].program[0])} "$@"\n')
    other.chmod(0o755)
    assert HostToolchain(host.probe([str(other)])).identity() == HostToolchain(found["gcc"]).identity()


def test_identity_holds_the_users_options_but_no_path(tools: HostToolchain) -> None:
    compiler = tools.compiler
    identities = [
        HostToolchain(dataclasses.replace(compiler, options=options)).identity()
        for options in [(), ("-O1",), ("-O2",), ("--sysroot=/opt/one",), ("--sysroot=/opt/two",)]
    ]
    assert len(set(identities)) == 5
    assert not any("/opt" in identity for identity in identities)


# Finding


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no compiler, and an empty folder that is its PATH."""
    monkeypatch.delenv("JITATTN_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    return tmp_path


def test_no_compiler_says_what_to_install(bare: Path) -> None:
    with pytest.raises(ToolchainMissing) as caught:
        host.find()
    for words in ("apt install g++", "xcode-select --install", "pip install 'jitattn[cpu]'", "JITATTN_CXX"):
        assert words in str(caught.value)


def test_the_package_finds_the_host_compiler(found: dict[str, Compiler], monkeypatch: pytest.MonkeyPatch) -> None:
    if not found:
        pytest.skip("no compiler here")
    monkeypatch.delenv("JITATTN_CXX", raising=False)
    here = target.host()
    assert toolchain.find(here) is toolchain.find(here)
    with pytest.raises(ToolchainMissing, match="hip"):
        toolchain.find(dataclasses.replace(here, vendor="hip"))


@LINUX
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (["Target: x86_64-redhat-linux", "gcc version 8.5.0 20210514 (Red Hat 8.5.0-4) (GCC)"], "older than gcc 9"),
        (["clang version 9.0.1", "Target: x86_64-pc-linux-gnu"], "older than clang 10"),
        (["Apple clang version 11.0.3", "Target: x86_64-apple-darwin19.6.0"], "older than clang 10"),
        (["clang version 18.1.8", "Target: x86_64-pc-windows-msvc"], "Microsoft"),
        (["Microsoft (R) C/C++ Optimizing Compiler Version 19.40"], "neither GCC nor Clang"),
    ],
)
def test_what_will_not_do_is_passed_over_with_a_reason(bare: Path, said: list[str], reason: str) -> None:
    pretend(bare / "c++", *said)
    with pytest.raises(ToolchainMissing, match=reason):
        host.find()
    pretend(bare / "g++", "Target: riscv64-linux-gnu", "gcc version 14.1.0 (Debian 14.1.0-1)")
    assert [entry for entry in host.survey() if isinstance(entry, Compiler)] == [
        Compiler((str(bare / "g++"),), (), "gcc", 14, "gcc 14.1.0 (Debian 14.1.0-1)", "riscv64-linux-gnu")
    ]
    assert host.find().compiler.version == "gcc 14.1.0 (Debian 14.1.0-1)"


def test_the_users_choice_is_never_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITATTN_CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(ToolchainMissing, match="no-such-compiler"):
        host.find()


@LINUX
def test_the_users_choice_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tools: HostToolchain) -> None:
    monkeypatch.setenv("JITATTN_CXX", f"{shlex.join(tools.compiler.program)} -DANSWER='(40 + 2)'")
    chosen = host.find()
    assert chosen.compiler.program == tools.compiler.program
    assert chosen.identity() != tools.identity()
    assert answers(chosen.compile(ANSWER, ()).data) == 42


@LINUX
def test_the_users_choice_may_be_a_relative_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tools: HostToolchain
) -> None:
    (tmp_path / "my compiler").write_text(f'#!/bin/sh\nexec {shlex.join(tools.compiler.program)} "$@"\n')
    (tmp_path / "my compiler").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    if tools.compiler.kind == "zig":
        pytest.skip("zig is known by its name")
    monkeypatch.setenv("JITATTN_CXX", "'./my compiler' -DANSWER=3")
    assert answers(host.find().compile(ANSWER, ()).data) == 3


@pytest.mark.parametrize("cxx", ["'unbalanced", " "])
def test_a_choice_that_is_no_command_line(monkeypatch: pytest.MonkeyPatch, cxx: str) -> None:
    monkeypatch.setenv("JITATTN_CXX", cxx)
    with pytest.raises(ToolchainMissing, match="JITATTN_CXX="):
        host.find()


@LINUX
def test_a_wrapper_before_the_compiler(tools: HostToolchain) -> None:
    compiler = host.probe(["env", "ANSWER=1", *tools.compiler.program, "-DANSWER=7"])
    assert compiler.version == tools.compiler.version and compiler.options == ("-DANSWER=7",)
    assert answers(HostToolchain(compiler).compile(ANSWER, ()).data) == 7


def test_zig_as_a_module(zig: Compiler) -> None:
    compiler = host.probe([sys.executable, "-m", "ziglang", "c++", "-DANSWER=5"])
    assert (compiler.kind, compiler.version, compiler.options) == ("zig", zig.version, ("-DANSWER=5",))
    assert answers(HostToolchain(compiler).compile(ANSWER, ()).data) == 5


# Spelling


def test_compilers_older_than_the_levels_get_features(found: dict[str, Compiler]) -> None:
    flags = target.parse("host:x86-64-v4+bf16").compile_flags
    old = Compiler(("g++",), (), "gcc", 10, "gcc 10", "x86_64-linux-gnu")
    spelled = host._spelled(flags, old)
    assert {"-mfma", "-mavx512vl", "-mavx512bf16"} <= set(spelled) and "-march=x86-64-v4" not in spelled
    assert host._spelled(("-march=x86-64",), old) == ("-march=x86-64",)
    if "gcc" in found and target._processor() == "x86":
        new = HostToolchain(found["gcc"])
        as_levels, as_features = (host.listing(new.compile(kernel(64), f).data) for f in (flags, spelled))
        assert as_levels == as_features


def test_zig_is_always_told_a_processor() -> None:
    zig = Compiler(("zig", "cc"), (), "zig", 0, "zig 0.15.1", "x86_64-linux-gnu.2.28")
    spelled = {arch: host._spelled(row.compile_flags, zig) for arch, row in target.HOST_ARCHS.items()}
    assert spelled["x86-64-v4+bf16"] == ("-mcpu=x86_64_v4+avx512bf16", "-mprefer-vector-width=512")
    assert spelled["aarch64"] == ("-mcpu=generic",) and spelled["generic"] == ("-mcpu=baseline",)


@pytest.mark.parametrize(
    ("triple", "magic"),
    [
        ("x86_64-windows-gnu", b"MZ"),
        ("aarch64-windows-gnu", b"MZ"),
        ("aarch64-macos", b"\xcf\xfa\xed\xfe"),
        ("x86_64-macos", b"\xcf\xfa\xed\xfe"),
        ("aarch64-linux-gnu.2.28", b"\x7fELF"),
        ("x86_64-linux-musl", b"\x7fELF"),
    ],
)
def test_zig_links_for_other_systems(zig: Compiler, triple: str, magic: bytes) -> None:
    arch = "aarch64" if triple.startswith("aarch64") else "x86-64-v3"
    tools = HostToolchain(dataclasses.replace(zig, triple=triple))
    binary = tools.compile(kernel(), target.parse(f"host:{arch}").compile_flags)
    assert binary.data.startswith(magic) and b"scale_log" in binary.data


def test_zig_brings_its_library_when_a_kernel_needs_it(zig: Compiler) -> None:
    text = "volatile unsigned __int128 n = 84, d = 2;\n" + ANSWER.replace("ANSWER", "int(n / d)")
    assert answers(HostToolchain(zig).compile(text, ()).data) == 42


# Listing


def test_listing_names_the_functions(tools: HostToolchain) -> None:
    listing = host.listing(tools.compile(kernel(), ()).data)
    if "disassembler" in listing:
        pytest.skip("no objdump here")
    assert "scale_log" in listing and "ret" in listing


def test_listing_without_a_disassembler_says_so(bare: Path) -> None:
    assert "objdump" in host.listing(b"")


# Loading


def test_each_load_is_a_library_of_its_own(tools: HostToolchain) -> None:
    data = tools.compile(kernel(), ()).data
    first, second = runtime.load(data), runtime.load(data)
    assert [first.count(), first.count(), second.count()] == [1, 2, 1]


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(JitattnError, match="does not load"):
        runtime.load(b"not a library")


@LINUX
def test_loading_falls_back_to_files(tools: HostToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> int:
        raise PermissionError("denied")

    data = tools.compile(kernel(), ()).data
    monkeypatch.setattr(os, "memfd_create", denied)
    assert runtime.load(data).count() == 1
    # As with /tmp mounted noexec: nothing there loads.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file" / "missing"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "cache"))
    assert runtime.load(data).count() == 1
    assert list((tmp_path / "cache").iterdir()) == []


@LINUX
def test_a_refused_library_leaves_no_descriptor_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(JitattnError):
        runtime.load(b"\x7fELF and nothing more")
    assert len(os.listdir("/proc/self/fd")) == before
