"""Imports go one way, down the rows of a table, and importing the package costs and does nothing."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "jitattn"

# Every module of the package (a subpackage counts as one), the lowest row first. A module may import from lower rows
# only: not from higher ones, and not from its neighbours. A new module is given the lowest row that serves it.
ROWS = (
    {"errors"},
    {"config", "settings", "wgmma"},
    {"artifact", "mods", "params", "problem", "target"},
    {"plan", "progress", "runtime", "source", "store", "toolchain"},
    {"cache", "pipeline"},
    {"launch", "reference"},
    {"ops"},
    {"api"},
    {"peers", "service", "transformer"},
    {"bench", "compat", "demo", "doctor"},
    {"cli"},
    {"__init__", "__main__"},
)
ROW = {name: row for row, names in enumerate(ROWS) for name in names}

# The three lowest rows are what a build box without a GPU needs: descriptions, no tensors.
GPU_LIBRARIES = {"torch", "triton", "cupy", "cupy_backends", "cuda", "hip"}


def modules() -> dict[Path, str]:
    """Every Python file of the package and the module or subpackage, of those in ROWS, that it belongs to."""
    return {path: path.relative_to(PACKAGE).with_suffix("").parts[0] for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """The dotted names that a file imports, wherever in it, each from its top package on."""
    package = ("jitattn", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)


def edges(path: Path) -> Iterator[str]:
    """The modules of ROWS that a file imports. The package itself stands for the highest of its public names."""
    for name in imported(path):
        if name[0] == "jitattn":
            yield name[1] if len(name) > 1 and name[1] in ROW else "service"


def test_every_module_has_a_row() -> None:
    assert not set(modules().values()) - set(ROW), "a new module: give it a row in ROWS"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    importer = modules()[path]
    row = ROW.get(importer, len(ROWS))
    wrong = {name for name in edges(path) if name != importer and ROW[name] >= row}
    assert not wrong, f"{importer} is in row {row}: " + ", ".join(f"{name} in {ROW[name]}" for name in wrong)


def test_low_rows_know_no_tensors_and_no_gpu() -> None:
    low = {name for row in ROWS[:3] for name in row}
    wrong = {
        f"{module} imports {name[0]}"
        for path, module in modules().items()
        if module in low
        for name in imported(path)
        if name[0] in GPU_LIBRARIES
    }
    assert not wrong


IMPORT = """
import json, os, sys, threading, time
import torch

touched = []

def watch(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            touched.append(str(path))
    elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect"):
        touched.append(f"{event} {arguments[0]}")

sys.addaudithook(watch)
threads, start = threading.active_count(), time.perf_counter()
import jitattn
milliseconds = (time.perf_counter() - start) * 1e3
print(json.dumps([milliseconds, touched, threading.active_count() - threads, torch.cuda.is_initialized()]))
"""


def test_import_takes_no_time_and_touches_nothing(run_python: Callable[..., str]) -> None:
    times = []
    for _ in range(3):  # a busy machine may delay one of them
        milliseconds, touched, threads, gpu = json.loads(run_python(IMPORT, PYTHONDONTWRITEBYTECODE="1"))
        assert touched == [] and threads == 0 and not gpu
        times.append(milliseconds)
        if milliseconds < 50:
            return
    pytest.fail(f"import jitattn took {times} ms after import torch")
