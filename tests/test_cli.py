"""Every subcommand, its exit status and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import jitattn
from jitattn import cache, cli, doctor, store, target
from jitattn.artifact import Artifact, key_of
from jitattn.errors import ToolchainMissing
from jitattn.toolchain import nvrtc

SMALL = ["--head-dim", "16", "--seq", "64", "--heads", "2"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What a command line prints on stdout."""
    assert cli.main(arguments) == status
    return capsys.readouterr().out


def test_help_and_version_import_no_torch(run_python: Callable[..., str]) -> None:
    text = """
import sys
from jitattn import cli
for arguments in (["--help"], ["bench", "--help"], ["--version"]):
    try:
        cli.main(arguments)
    except SystemExit as stop:
        assert stop.code == 0
assert "torch" not in sys.modules
"""
    out = run_python(text)
    assert all(name in out for name in ("demo", "doctor", "show", "bench", "cache"))
    assert f"jitattn {jitattn.__version__}" in out


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["demo", "--steps", "0"], ["show", "--listing", "--resources"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
    assert "invalid positive number value: '0'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor_reports_and_tries(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "doctor")
    assert torch.__version__ in out and "<- used" in out and str(target.host()) in out
    assert out.rstrip().endswith("\nok")


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "doctor", "--json"))
    assert report["check"]["passed"]
    assert {"cpu", "compiler", "target", "torch", "threads", "date", "commit"} <= set(report["machine"])
    assert {"compiler", "processor", "gpu", "cache"} <= {finding["label"] for finding in report["findings"]}


def test_doctor_fails_on_a_wrong_result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attention = jitattn.attention
    monkeypatch.setattr(jitattn, "attention", lambda *a, backend, **o: attention(*a, backend=backend, **o) * (
        1.0 if backend else 1.0001))  # fmt: skip
    assert run(capsys, "doctor", status=1).rstrip().endswith("NOT OK")


def test_doctor_without_a_compiler_says_what_to_install(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    env = {**subprocess_env, "JITATTN_CXX": str(tmp_path / "nothing"), "JITATTN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "jitattn", "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout.rstrip().endswith("NOT OK")
    assert 'pip install "jitattn[cpu]"' in done.stdout and "JITATTN_CXX" in done.stdout


@pytest.mark.parametrize(
    ("built_for", "line"),
    [
        ({"cuda": "13.0", "hip": None}, 'pip install "jitattn[cuda13]"'),
        ({"cuda": "12.9", "hip": None}, 'pip install "jitattn[cuda12]"'),
        ({"cuda": None, "hip": "7.1"}, 'pip install "jitattn[rocm]"'),
    ],
)
def test_doctor_names_the_extra_of_a_gpu(
    built_for: dict[str, str | None], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        name, major, minor, total_memory, gcnArchName = "a GPU", 9, 0, 1 << 36, "gfx942"

    for name, version in built_for.items():
        monkeypatch.setattr(torch.version, name, version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(doctor, "_installed", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert line in [finding.remedy for finding in doctor._gpus()]


# ------------------------------------------------------------------------------------------------ show


def test_show_prints_the_source_of_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    forward = run(capsys, "show", *SMALL, "--causal")
    assert "struct Config" in forward and "head_dim = 16" in forward and "causal = true" in forward
    kernels = json.loads(run(capsys, "show", *SMALL, "--backward", "--head-dim-v", "24", "--json"))
    assert kernels
    assert all(key_of(kernel["source"]) == kernel["key"] for kernel in kernels)
    assert all("head_dim_v = 24" in kernel["source"] for kernel in kernels)


def test_show_source_for_another_target(capsys: pytest.CaptureFixture[str]) -> None:
    (kernel,) = json.loads(run(capsys, "show", *SMALL, "--target", "host:generic", "--json"))
    assert kernel["target"] == "host:generic" and "host:generic" in kernel["source"]


def test_show_resources_and_listing(capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = json.loads(run(capsys, "show", *SMALL, "--resources", "--json"))
    assert facts["binary_bytes"] > 0 and "source" not in facts
    assert "binary_bytes" in run(capsys, "show", *SMALL, "--resources")
    listing = run(capsys, "show", *SMALL, "--listing")
    assert "<jitattn_work>:" in listing or "objdump" in listing


def test_show_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        nvrtc.find("sm_80")
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    problem = [*SMALL, "--dtype", "float16", "--target", "sm_80", "--backward"]
    delta, backward, *_ = json.loads(run(capsys, "show", *problem, "--json"))
    assert delta["target"] == "cuda:sm_80" and "--gpu-architecture=sm_80" in delta["compiler flags"]
    assert "jitattn_kernel" in backward["source"] and "grad_query = true" in backward["source"]
    for facts in json.loads(run(capsys, "show", *problem, "--resources", "--json")):
        assert facts["registers"] > 0 and facts["threads"] % 32 == 0 and facts["shared_bytes"] >= 0
    assert ".target sm_80" in run(capsys, "show", *problem, "--ptx")
    listing = run(capsys, "show", *problem, "--sass")
    assert "EXIT" in listing or "nvidia-cuda-nvdisasm" in listing
    other = json.loads(run(capsys, "show", *problem, "--deterministic", "--alignment", "4", "--json"))
    assert "vector = 4" in other[1]["source"] and "attn::GradQuery" in other[2]["source"]


def test_show_has_no_ptx_of_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--ptx"]) == 1
    assert "has no PTX" in capsys.readouterr().err


def test_show_refuses_what_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "--target", "host:pdp11"]) == 1
    assert "host:pdp11" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell's pipe")
def test_a_reader_may_go_away(subprocess_env: dict[str, str]) -> None:
    command = f"{sys.executable} -m jitattn show --backward | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=subprocess_env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------ cache


def test_cache_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JITATTN_CACHE_DIR", str(tmp_path / "cache"))
    assert json.loads(run(capsys, "cache", "info", "--json"))["entries"] == 0
    assert "empty" in run(capsys, "cache", "ls")
    assert not (tmp_path / "cache").exists(), "looking made something"

    store.default().put(Artifact.create("text", b"binary", target="host:generic", entry="run", toolchain="a compiler"))
    assert "1 in " in run(capsys, "cache", "info")
    assert "host:generic" in run(capsys, "cache", "ls")
    assert [entry["key"] for entry in json.loads(run(capsys, "cache", "ls", "--json"))["entries"]] == [key_of("text")]
    assert json.loads(run(capsys, "cache", "verify", "--json")) == {"sound": 1, "removed": []}
    assert json.loads(run(capsys, "cache", "prune", "--max-size", "1M", "--json"))["removed"] == 0
    assert json.loads(run(capsys, "cache", "prune", "--unused-days", "1", "--json"))["removed"] == 0
    assert run(capsys, "cache", "prune", "--all").startswith("1 ")
    assert json.loads(run(capsys, "cache", "info", "--json"))["entries"] == 0


def test_verify_tells_a_script_of_damage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "verify", lambda: cache.Verified(3, ("0123",)))
    assert "0123" in run(capsys, "cache", "verify", status=1)
