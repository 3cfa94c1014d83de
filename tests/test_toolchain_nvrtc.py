"""NVRTC without a GPU: which library, which build of it, what it makes of a text and what it tells about it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitattn import settings, target, toolchain
from jitattn.errors import CompileError, ToolchainMissing
from jitattn.toolchain import nvrtc, nvrtc_library
from jitattn.toolchain.nvrtc_library import Library

FOUND = [found for found in nvrtc.survey(settings.current().nvrtc) if isinstance(found, Library)]
NEEDS_NVRTC = pytest.mark.skipif(not FOUND, reason="NVRTC is not installed")

KERNEL = """\
#line 1 "kernel_src/some/file.h"
extern "C" __device__ const int jitattn_shape[2] = {%d, %d};
extern "C" __global__ void __launch_bounds__(%d) jitattn_kernel(float* x) {
  extern __shared__ __align__(128) char memory[];
  ((float*)memory)[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = ((float*)memory)[threadIdx.x ^ 1];
}
"""


def kernel(threads: int = 128, shared_bytes: int = 70000) -> str:
    return KERNEL % (threads, shared_bytes, threads)


def compiler(arch: str) -> nvrtc.Nvrtc:
    try:
        return nvrtc.find(arch)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))


# ------------------------------------------------------------------------------------------------ what it makes


@NEEDS_NVRTC
@pytest.mark.parametrize("arch", target.CUDA_ARCHS)
def test_every_architecture_is_compiled_for_with_no_gpu(arch: str) -> None:
    on = target.parse(arch)
    tools = compiler(arch)
    assert toolchain.find(on) is tools
    binary = tools.compile(kernel(96, 1 << 16), on.compile_flags)
    assert binary.data.startswith(b"\x7fELF") and b"jitattn_kernel" in binary.data
    assert (binary.resources["threads"], binary.resources["shared_bytes"]) == (96, 1 << 16)
    assert 0 < binary.resources["registers"] < 64
    assert binary.resources["spill_bytes"] == binary.resources["stack_bytes"] == 0
    assert "warnings" not in binary.resources and binary.seconds > 0
    assert binary.data == tools.compile(kernel(96, 1 << 16), on.compile_flags).data, "not reproducible"


@NEEDS_NVRTC
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_ptx_for_newer_gpus(arch: str) -> None:
    on = target.portable(target.parse(arch))
    binary = compiler(on.arch).compile(kernel(64, 0), on.compile_flags)
    text = binary.data.decode()
    assert f".target {arch}" in text and ".entry jitattn_kernel" in text
    assert binary.resources == {"threads": 64, "shared_bytes": 0}


@NEEDS_NVRTC
def test_a_refused_text_leaves_its_log_and_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path))
    text = kernel().replace("__syncthreads", "__sink_threads")
    with pytest.raises(CompileError, match="NVRTC.*refused") as caught:
        compiler("sm_90").compile(text, ("--gpu-architecture=sm_90",))
    assert "kernel_src/some/file.h(5)" in caught.value.log and "__sink_threads" in str(caught.value)
    assert Path(caught.value.source_path or "").read_text() == text
    assert Path(caught.value.source_path or "").suffix == ".cu"


@NEEDS_NVRTC
def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        compiler("sm_90").compile(kernel(), ("--gpu-architecture=sm_13",))


@NEEDS_NVRTC
def test_spills_are_told() -> None:
    """More live values than a thread of so large a block has registers."""
    text = """
extern "C" __device__ const int jitattn_shape[2] = {1024, 0};
extern "C" __global__ void __launch_bounds__(1024, 2) jitattn_kernel(float* x) {
  float y[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) y[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = y[i] * y[(i * 7) % 96];
}
"""
    resources = compiler("sm_80").compile(text, ("--gpu-architecture=sm_80",)).resources
    assert resources["spill_bytes"] > 0 and resources["stack_bytes"] > 0 and resources["registers"] == 32


@NEEDS_NVRTC
def test_threads_compile_side_by_side() -> None:
    tools, flags = compiler("sm_90"), ("--gpu-architecture=sm_90",)
    texts = [kernel(32 * count, 1000 * count) for count in range(1, 9)]
    alone = [tools.compile(text, flags).data for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert [binary.data for binary in pool.map(lambda text: tools.compile(text, flags), texts)] == alone


@NEEDS_NVRTC
def test_listing() -> None:
    binary = compiler("sm_90").compile(kernel(), ("--gpu-architecture=sm_90",)).data
    listing = nvrtc.listing(binary)
    assert "EXIT" in listing or "pip install nvidia-cuda-nvdisasm" in listing
    assert nvrtc.listing(b".version 9.0") == ".version 9.0"


def test_listing_without_a_disassembler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_tool", lambda name: None)
    assert "pip install nvidia-cuda-nvdisasm" in nvrtc.listing(b"\x7fELF")


# ------------------------------------------------------------------------------------------------ what it tells


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (".global .align 4 .b8 jitattn_shape[8] = {0, 1, 0, 0, 0, 0, 1};", (256, 65536)),
        (".global .align 4 .b8 jitattn_shape[8] = {128, 0, 0, 0, 1};", (128, 1)),
        (".global .align 4 .b8 jitattn_shape[8] = {128};", (128, 0)),
        (".visible .const .align 4 .b8 jitattn_shape[8] = {32, 0, 0, 0, 255, 255, 3, 0};", (32, 262143)),
        (".visible .global .align 4 .b32 jitattn_shape[2] = {384, 232448};", (384, 232448)),
    ],
)
def test_the_shape_is_read_from_ptx(text: str, shape: tuple[int, int]) -> None:
    found = nvrtc._shape(f".version 9.0\n{text}\n.entry jitattn_kernel()")
    assert (found["threads"], found["shared_bytes"]) == shape


def test_a_text_without_a_shape_tells_none() -> None:
    assert nvrtc._shape(".version 9.0\n.entry jitattn_kernel()") == {}


LOG = """\
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'jitattn_kernel' for 'sm_90a'
ptxas info    : Function properties for jitattn_kernel
ptxas         .     24 bytes stack frame, 40 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; warning
ptxas warning : (C7517) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def test_resources_and_warnings_are_read_from_the_log() -> None:
    found = nvrtc._of_log(LOG)
    warnings = found.pop("warnings")
    assert found == {"registers": 168, "stack_bytes": 24, "spill_bytes": 40, "static_shared_bytes": 128}
    assert ["C7508" in warnings[0], "C7517" in warnings[1]] == [True, True] and len(warnings) == 2


# ------------------------------------------------------------------------------------------------ which build


@NEEDS_NVRTC
@pytest.mark.parametrize("library", FOUND, ids=str)
def test_the_file_says_the_same_build_as_the_compiler(library: Library) -> None:
    path = Path(library.path)
    assert nvrtc_library._from_file(path) == nvrtc_library._from_output(path)


@NEEDS_NVRTC
def test_identity_is_the_whole_build_and_no_path() -> None:
    tools = compiler("sm_90")
    assert re.fullmatch(r"NVRTC \d+\.\d+\.\d+ build \d{6,}; -\S+( -\S+)*", tools.identity())
    assert os.sep not in tools.identity()


@NEEDS_NVRTC
def test_line_numbers_for_profilers_are_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiler("sm_90")
    monkeypatch.setenv("JITATTN_LINE_INFO", "1")
    lined = nvrtc.find("sm_90")
    assert lined.identity() == f"{plain.identity()} --generate-line-info"
    flags = ("--gpu-architecture=sm_90",)
    assert b"debug_line" in lined.compile(kernel(), flags).data
    assert b"debug_line" not in plain.compile(kernel(), flags).data


@NEEDS_NVRTC
@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_identity_loads_no_library(run_python: Callable[..., str]) -> None:
    """A process that finds its kernels in the cache needs the identity, and never the compiler."""
    text = (
        "from jitattn.toolchain import nvrtc\n"
        "tools = nvrtc.find('sm_90')\n"
        "print(tools.identity())\n"
        "loaded = [line for line in open('/proc/self/maps') if 'nvrtc' in line]\n"
        "assert not loaded, loaded\n"
    )
    assert "NVRTC" in run_python(text)


def test_a_file_that_says_no_build_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libnvrtc.so.13"
    path.write_bytes(b"\x7fELF\x02\x01" + bytes(100) + b"CL-12345 is too short, and no version")
    monkeypatch.setattr(nvrtc_library, "_from_output", lambda _: ("13.1.2", "777777"))
    monkeypatch.setattr(nvrtc_library, "_constants", lambda memory: (0, len(memory)))
    assert nvrtc_library.look_at(path) == Library(str(path), (13, 1, 2), "777777")


# ------------------------------------------------------------------------------------------------ which library


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with no CUDA, and the folder where its pip packages named nvidia would be."""
    for name in ("JITATTN_NVRTC", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    packages = tmp_path / "nvidia"
    specs = {"nvidia": SimpleNamespace(submodule_search_locations=[str(packages)])}
    monkeypatch.setattr(nvrtc_library.importlib.util, "find_spec", specs.get)
    monkeypatch.setattr(nvrtc_library, "_system_folders", lambda: iter([tmp_path / "system"]))
    nvrtc._find.cache_clear()
    yield packages
    nvrtc._find.cache_clear()


def install(folder: Path, version: str) -> Path:
    """A file that says it is NVRTC of that version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"libnvrtc.so.{version.partition('.')[0]}"
    said = f"Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}\0CL-1234567\0"
    path.write_bytes(said.encode())
    nvrtc_library.look_at.cache_clear()
    return path


def test_no_library_says_what_to_install(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainMissing, match=r'pip install "jitattn\[cuda13\]".*JITATTN_NVRTC'):
        nvrtc.find("sm_90")
    monkeypatch.setattr(nvrtc, "torch_cuda", lambda: 12)
    with pytest.raises(ToolchainMissing, match=r'pip install "jitattn\[cuda12\]"'):
        nvrtc.find("sm_90")
    install(bare / "cuda_nvrtc" / "lib", "12.9.86")
    assert nvrtc.find("sm_90").library.version == (12, 9, 86), "one that has been installed since is not found"


def test_a_chosen_library_is_not_replaced(bare: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(bare / "cu13" / "lib", "13.0.88")
    monkeypatch.setenv("JITATTN_NVRTC", str(tmp_path / "nothing.so"))
    with pytest.raises(ToolchainMissing, match="nothing.so"):
        nvrtc.find("sm_90")
    monkeypatch.setenv("JITATTN_NVRTC", str(install(tmp_path / "mine", "12.6.20")))
    assert nvrtc.find("sm_90").library.version == (12, 6, 20)


@pytest.mark.parametrize(("of_torch", "first"), [(13, 13), (12, 12), (0, 13)])
def test_the_one_of_torch_comes_first(bare: Path, monkeypatch: pytest.MonkeyPatch, of_torch: int, first: int) -> None:
    install(bare / "cu13" / "lib", "13.0.88")
    install(bare / "cuda_nvrtc" / "lib", "12.9.86")
    monkeypatch.setattr(nvrtc_library, "torch_cuda", lambda: of_torch)
    assert nvrtc.find("sm_90").library.version[0] == first


def test_packages_come_before_the_system(bare: Path, tmp_path: Path) -> None:
    install(tmp_path / "system", "13.1.5")
    assert nvrtc.find("sm_90").library.version == (13, 1, 5)
    nvrtc._find.cache_clear()
    install(bare / "cu13" / "lib", "13.0.88")
    assert nvrtc.find("sm_90").library.version == (13, 0, 88)


@pytest.mark.parametrize(
    ("version", "arch", "knows"),
    [
        ("13.0.88", "sm_70", False),
        ("12.9.86", "sm_70", True),
        ("12.9.86", "compute_70", True),
        ("12.6.20", "sm_100a", False),
        ("12.8.61", "sm_100a", True),
        ("12.8.61", "sm_103a", False),
        ("12.9.86", "sm_121a", True),
        ("12.9.86", "sm_110a", False),
        ("13.0.88", "sm_110a", True),
        ("11.8.89", "sm_80", False),
    ],
)
def test_which_versions_know_an_architecture(bare: Path, version: str, arch: str, knows: bool) -> None:
    install(bare / "cu13" / "lib", version)
    if knows:
        assert ".".join(map(str, nvrtc.find(arch).library.version)) == version
        return
    with pytest.raises(ToolchainMissing, match=f"{version}.*does not know {arch}"):
        nvrtc.find(arch)


def test_another_library_serves_an_architecture_that_the_first_does_not_know(bare: Path) -> None:
    install(bare / "cu13" / "lib", "13.0.88")
    install(bare / "cuda_nvrtc" / "lib", "12.9.86")
    assert nvrtc.find("sm_70").library.version == (12, 9, 86)
    assert nvrtc.find("sm_75").library.version == (13, 0, 88)


def test_torchs_cuda_is_read_without_importing_it(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").touch()
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(nvrtc_library.importlib.util, "find_spec", lambda name: spec if name == "torch" else None)
    assert nvrtc_library.torch_cuda() == 0, "no version.py"
    for line, major in (("cuda: Optional[str] = '13.0'", 13), ("cuda = '12.8'", 12), ("cuda: str | None = None", 0)):
        (folder / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip = None\n")
        assert nvrtc_library.torch_cuda() == major
