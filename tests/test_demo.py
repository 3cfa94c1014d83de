"""The demo: it trains on jitattn, says what it compiled, agrees with torch, and notices when it should not."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import jitattn
from jitattn import cli, demo, transformer


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """So that a busy machine slows the tests down in proportion and no more."""
    torch.set_num_threads(1)


SMALL = ["--context", "64", "--device", "cpu"]


def test_second_run_compiles_nothing(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    settings = {"JITATTN_CACHE_DIR": str(tmp_path / "cache"), "JITATTN_LOG": "info", "OMP_NUM_THREADS": "1"}
    env = {**subprocess_env, **settings}
    runs = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "jitattn", "demo", "--steps", "4", *SMALL, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "The loss curves agree." in done.stdout
        runs.append((done, json.loads((tmp_path / name / "run.json").read_text())))
    (first, first_record), (second, second_record) = runs

    compiled = first_record["kernels"]["compiled"]
    assert compiled > 0 and first_record["kernels"]["disk_hits"] == 0
    assert first.stderr.count("compiling") == compiled
    assert second_record["kernels"]["compiled"] == 0 and second_record["kernels"]["disk_hits"] == compiled
    assert f"0 compiled, {compiled} from the cache" in second.stdout
    assert "compiling" not in second.stderr
    # The same seed gives the same run, bit for bit, from compiled and from cached kernels.
    assert first_record["losses"] == second_record["losses"] and first_record["sample"] == second_record["sample"]

    with (tmp_path / "first" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["jitattn"]) for row in rows] == first_record["losses"]["jitattn"] and len(rows) == 4
    png = tmp_path / "first" / "curves.png"
    assert png.read_bytes().startswith(b"\x89PNG") if png.exists() else "jitattn[plot]" in first.stdout
    assert first_record["machine"]["cpu"] and first_record["machine"]["torch"] == torch.__version__


def test_every_attention_layer_goes_through_jitattn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attention = [], jitattn.attention

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(args[0].shape)
        return attention(*args, **options)

    monkeypatch.setattr(jitattn, "attention", counting)
    monkeypatch.setattr(transformer, "SAMPLE_LENGTH", 2)
    assert cli.main(["demo", "--steps", "3", *SMALL, "--out", str(tmp_path)]) == 0
    forwards = 2 + 3 + transformer.VALIDATION_WINDOWS + transformer.SAMPLE_LENGTH
    assert len(calls) == forwards * demo.CPU.layers
    assert {shape[2:] for shape in calls} == {(64, demo.CPU.head_dim)}


FAULTS = {
    "scale 1 % off": lambda q, k, v: jitattn_attention(q, k, v, causal=True, scale=0.12625),
    "sees the future": lambda q, k, v: jitattn_attention(q, k, v),
    "no gradient of K": lambda q, k, v: jitattn_attention(q, k.detach(), v, causal=True),
    "NaN": lambda q, k, v: jitattn_attention(q, k, v, causal=True) * math.nan,
}
jitattn_attention = jitattn.attention


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jitattn, "attention", lambda q, k, v, causal: FAULTS[fault](q, k, v))
    monkeypatch.setattr(demo, "write_text", lambda *_: "")
    assert cli.main(["demo", "--steps", "10", *SMALL, "--out", str(tmp_path)]) == 1
    assert "DO NOT AGREE" in capsys.readouterr().out
    assert not json.loads((tmp_path / "run.json").read_text())["agreement"]["agree"]


def test_allowed_difference_follows_the_drift_of_torch() -> None:
    theirs = [4.0] * 20
    twin = [4.0] * 12 + [4.001, 4.0] + [4.0] * 6
    agreement = demo.Agreement.of(theirs, theirs, twin)
    floor = demo.MARGIN * torch.finfo(torch.float32).eps * 4
    assert agreement.allowed[:12] == pytest.approx([floor] * 12)
    assert agreement.allowed[12:] == pytest.approx([demo.MARGIN * 1e-3] * 8)  # it never shrinks again
    assert agreement.agree
    assert demo.Agreement.of([4.0] * 15 + [4.009] + [4.0] * 4, theirs, twin).agree
    assert not demo.Agreement.of([4.0] * 15 + [4.011] + [4.0] * 4, theirs, twin).agree
    assert not demo.Agreement.of([4.0] * 5 + [4.001] + [4.0] * 14, theirs, twin).agree
    assert not demo.Agreement.of([math.nan, *theirs[1:]], theirs, twin).agree


def test_lanes_start_equal_and_see_the_same_batches() -> None:
    plan = demo.plan_for("cpu", context=32, batch=2, seed=3)
    first, *others = demo.make_lanes(plan, alphabet=50)
    for lane in others:
        pairs = zip(first.model.parameters(), lane.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    text = transformer.Text.load()
    assert torch.equal(text.batch(plan, 7), text.batch(plan, 7))
    assert not torch.equal(text.batch(plan, 7), text.batch(plan, 8))
    # Validation text is never trained on.
    assert text.split + plan.context < len(text.ids)


def test_a_slow_machine_stops_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "write_text", lambda *_: "")
    assert cli.main(["demo", "--steps", "50", "--minutes", "0", *SMALL, "--out", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "run.json").read_text())["losses"]
    assert [len(losses[name]) for name in demo.ATTENTIONS] == [demo.BLOCK] * 3


def test_without_matplotlib_the_numbers_are_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = {"losses": {"jitattn": [1.0], "torch": [1.0]}, "ratio": 1.0, "agreement": {}}
    demo.save(tmp_path, record)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "curves.csv"}
    assert 'pip install "jitattn[plot]"' in capsys.readouterr().out


def test_a_python_without_the_text_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert cli.main(["demo", *SMALL, "--out", str(tmp_path)]) == 1
    assert "pydoc_data.topics" in capsys.readouterr().err
