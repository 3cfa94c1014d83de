"""Settings for the whole test run: one kernel cache for all its processes, and no state left behind by a test."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Idle OpenMP threads sleep instead of spinning, so that two test processes, or a test and a compiler, can share cores.
# The run-time reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=300)
settings.register_profile("dev", parent=settings.get_profile("ci"), derandomize=False, print_blob=True)
settings.register_profile("deep", parent=settings.get_profile("dev"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_cache_made_here: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a cache folder of its own, which subprocesses and xdist workers share through the environment.

    JITATTN_TEST_CACHE names a folder to keep between runs instead.
    """
    config.addinivalue_line("markers", "slow: minutes rather than seconds")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    kept = os.environ.get("JITATTN_TEST_CACHE")
    if kept is None:
        _cache_made_here.append(tempfile.mkdtemp(prefix="jitattn-tests-"))
    os.environ["JITATTN_CACHE_DIR"] = kept or _cache_made_here[0]


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in _cache_made_here:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _restore_torch_state() -> Iterator[None]:
    """Undo what a test set for the whole process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def subprocess_env() -> dict[str, str]:
    """The environment for a child process that imports jitattn and tests from this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "2"}


@pytest.fixture
def run_python(subprocess_env: dict[str, str]):
    """Run Python text in a child process and return what it printed; fail with its output if it fails."""
    import subprocess

    def run(text: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", text],
            env={**subprocess_env, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            pytest.fail(f"child process ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-6000:]}")
        return done.stdout

    return run
