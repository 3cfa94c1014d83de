"""The table of environment variables: defaults, what each text means, and that nothing is read elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitattn import JitattnError, settings

PACKAGE = Path(settings.__file__).parent


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults() -> None:
    now = settings.current()
    assert now.cache_dir.is_absolute()
    assert (now.cache_bytes, now.cache_wait, now.log, now.compile_limit) == (1 << 30, 60.0, "info", 64)
    assert (now.cxx, now.host_isa, now.override) == (None, None, None)
    assert (now.nvrtc, now.cuda_arch, now.line_info) == (None, None, False)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("JITATTN_CACHE_DIR", "~/kernels", Path.home() / "kernels"),
        ("JITATTN_CACHE_SIZE", "512M", 512 << 20),
        ("JITATTN_CACHE_SIZE", "1.5 GiB", 3 << 29),
        ("JITATTN_CACHE_SIZE", "4096", 4096),
        ("JITATTN_CACHE_SIZE", "2kb", 2048),
        ("JITATTN_CACHE_WAIT", "0", 0.0),
        ("JITATTN_LOG", "Debug", "debug"),
        ("JITATTN_CXX", "g++-13", "g++-13"),
        ("JITATTN_HOST_ISA", "x86-64-v3", "x86-64-v3"),
        ("JITATTN_OVERRIDE", "/tmp/edited", Path("/tmp/edited")),
        ("JITATTN_NVRTC", "/opt/libnvrtc.so.13", Path("/opt/libnvrtc.so.13")),
        ("JITATTN_CUDA_ARCH", "sm_80", "sm_80"),
        ("JITATTN_LINE_INFO", "1", True),
        ("JITATTN_COMPILE_LIMIT", "3", 3),
    ],
)
def test_each_variable_is_read(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.current()
    monkeypatch.setenv(name, text)
    (variable,) = [variable for variable in settings.VARIABLES if variable.name == name]
    assert getattr(settings.current(), variable.field) == value
    monkeypatch.setenv(name, "")
    assert settings.current() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("JITATTN_CACHE_SIZE", "much"),
        ("JITATTN_CACHE_SIZE", "-1"),
        ("JITATTN_CACHE_SIZE", "inf"),
        ("JITATTN_CACHE_WAIT", "nan"),
        ("JITATTN_CACHE_WAIT", "-2"),
        ("JITATTN_LOG", "loud"),
        ("JITATTN_COMPILE_LIMIT", "many"),
    ],
)
def test_unreadable_text_is_an_error_that_names_the_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(JitattnError, match=name):
        settings.current()


def test_table_is_complete_and_readable() -> None:
    names = [variable.name for variable in settings.VARIABLES]
    assert len(set(names)) == len(names)
    for variable in settings.VARIABLES:
        assert variable.name.startswith("JITATTN_") and variable.shown_default
        assert variable.meaning.endswith(".") and len(variable.meaning) < 110


def test_variables_are_read_in_one_place() -> None:
    """Elsewhere in the package the environment is at most passed on, never asked for a variable of ours."""
    readers = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"(environ|getenv)\b[^\n]*JITATTN_", path.read_text(encoding="utf-8"))
    }
    assert not readers


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG folders")
def test_user_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert settings.user_cache_dir() == Path("/somewhere/jitattn")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/void")
    assert settings.user_cache_dir() == Path.home() / ".cache" / "jitattn"


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="HOME")
@pytest.mark.parametrize("checkout", [True, False])
def test_a_checkout_keeps_its_own_cache(checkout: bool, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "jitattn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()  # alone, as a careless package leaves it in site-packages
    if checkout:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "README.md").touch()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    environment.pop("XDG_CACHE_HOME", None)
    command = "from jitattn import settings; print(settings.current().cache_dir)"
    found = subprocess.run(
        [sys.executable, "-c", command], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    expected = tmp_path / "cache" if checkout else tmp_path / "home" / ".cache" / "jitattn"
    assert Path(found.strip()) == expected
    assert not (tmp_path / "home").exists()
