"""The benchmark: it pairs times within rounds, checks before it times, and reports what it left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn import bench, cli, doctor, peers


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """So that a busy machine slows the tests down in proportion and no more."""
    torch.set_num_threads(1)


CPU = torch.device("cpu")
CASE = peers.Case("float32", batch=1, heads=2, heads_kv=1, seq=65, head_dim=32, causal=True, passes="fwd+bwd")


def test_quick_run_writes_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # torch has read it long ago: here it is only recorded
    options = ["--quick", "--seq", "65", "--device", "cpu", "--threads", "1", "--heads", "2", "--out", str(tmp_path)]
    assert cli.main(["bench", *options]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert len(record["results"]) == 8  # two dtypes, two masks, two passes
    for result in record["results"]:
        assert set(result["ratio"]) == {"sdpa", "sdpa-math"} and result["skipped"] == {}
        assert all(len(times) >= bench.MIN_ROUNDS for times in result["seconds"].values())
        assert set(result["errors"]) == ({"out", "dq", "dk", "dv"} if result["case"]["passes"] != "fwd" else {"out"})
    machine = record["machine"]
    assert machine["threads"] == 1 and machine["environment"]["ATEN_CPU_CAPABILITY"] == "default"
    assert machine["cpu"] and machine["compiler"] and machine["date"] and machine["torch"] == torch.__version__
    png = tmp_path / "bench.png"
    assert png.read_bytes().startswith(b"\x89PNG") if png.exists() else True
    out = capsys.readouterr().out
    assert out.count("float32 ") == out.count("bfloat16 ") == 4


def test_ratios_pair_times_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down steadily changes the medians, and not the ratio."""
    now, slowness = [0.0], [1.0]

    def spend(seconds: float):
        def call() -> tuple[Tensor, ...]:
            now[0] += seconds * slowness[0]
            slowness[0] *= 1.01
            return ()

        return call

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    calls = {"jitattn": spend(1.0), "fast": spend(0.5), "slow": spend(3.0)}
    samples = bench.sample(calls, CPU, seconds=20.0)
    assert len(samples["jitattn"]) == len(samples["fast"]) > len(samples["slow"]) >= bench.MIN_ROUNDS
    for name, expected in (("fast", 0.5), ("slow", 3.0)):
        ratios = [a / b for a, b in zip(samples[name], samples["jitattn"], strict=False)]
        assert bench.statistics.median(ratios) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("fault", ["out", "gradient"])
def test_wrong_results_are_not_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention = jitattn.attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None, **options: Any) -> Tensor:
        if backend:
            return attention(q, k, v, backend=backend, **options)
        return (
            1.001 * attention(q, k, v, **options) if fault == "out" else attention(q, k, v.detach() + 0 * v, **options)
        )

    monkeypatch.setattr(jitattn, "attention", wrong)
    assert bench.run([CASE], CPU, tmp_path, doctor.machine(), seconds=0.01) == 1
    (result,) = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert "seconds" not in result and ("out is off" if fault == "out" else "dv is off") in result["failure"]
    assert "FAILED" in capsys.readouterr().out


def test_a_refused_case_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise jitattn.Unsupported("not in this version")

    monkeypatch.setattr(jitattn, "attention", refuse)
    assert bench.run([CASE], CPU, tmp_path, doctor.machine(), seconds=0.01) == 1
    assert json.loads((tmp_path / "bench.json").read_text())["results"][0]["failure"] == "not in this version"


def test_peers_that_cannot_run_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(case: bench.Case) -> bench.Attend:
        raise RuntimeError("no kernel for this")

    def everywhere(device: torch.device) -> None:
        return None

    tried = (
        *bench.PEERS[:1],
        peers.Peer("broken", everywhere, broken, lambda case: 0),
        peers.Peer("huge", everywhere, peers.sdpa, lambda case: 1 << 60),
    )
    result = bench.measure(CASE, tried, CPU, seconds=0.01)
    assert set(result["ratio"]) == {"sdpa"}
    assert result["skipped"]["broken"] == "no kernel for this" and "GiB" in result["skipped"]["huge"]
    assert "no kernel for this" in bench.row(CASE, result, tried)


def test_peers_not_importable_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = peers.Peer("absent", lambda device: "pip install absent", peers.sdpa, lambda case: 0)
    monkeypatch.setattr(bench, "PEERS", (*bench.PEERS, absent))
    assert bench.run([CASE], CPU, tmp_path, doctor.machine(), peers=["sdpa", "absent"], seconds=0.01) == 0
    out = capsys.readouterr().out
    assert "without absent: pip install absent" in out and "without sdpa-math: not asked for" in out


def test_operations_are_counted_as_products_of_visible_pairs() -> None:
    def flops(causal: bool, passes: peers.Passes) -> float:
        return peers.Case("float32", 2, 8, 8, 128, 64, causal, passes).flops

    forward = flops(False, "fwd")
    assert forward == 4 * 2 * 8 * 128 * 128 * 64
    assert flops(False, "bwd") == 2.5 * forward and flops(False, "fwd+bwd") == 3.5 * forward
    assert flops(True, "fwd") / forward == pytest.approx(129 / 256)


def test_tokens_and_width_are_shared_out() -> None:
    cases = bench.grid(["float16"], [64, 256], [32, 64], [False], ["fwd"], batch=1, heads=1, tokens=1024, width=128)
    assert {(case.seq, case.head_dim): (case.batch, case.heads, case.heads_kv) for case in cases} == {
        (64, 32): (16, 4, 4), (256, 32): (4, 4, 4), (64, 64): (16, 2, 2), (256, 64): (4, 2, 2),
    }  # fmt: skip


def test_a_backward_pass_alone_gives_the_same_gradients() -> None:
    both = peers.Case("float32", 1, 2, 2, 33, 16, True, "fwd+bwd")
    inputs = bench.make_inputs(both, CPU)
    attend = peers.sdpa(both)
    alone = bench.bind(attend, peers.Case("float32", 1, 2, 2, 33, 16, True, "bwd"), inputs)
    for _ in range(2):  # it can be called again and again
        for a, b in zip(alone(), bench.bind(attend, both, inputs)(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("options", [["--heads", "8", "--heads-kv", "3"], ["--peers", "nobody"], ["--seq", "0"]])
def test_unusable_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["bench", *options])
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and capsys.readouterr().err


def test_the_summary_is_of_the_best_peers() -> None:
    def result(passes: str, **ratio: float) -> dict[str, Any]:
        return {"case": {"passes": passes}, "ratio": ratio}

    lines = bench.summary(
        [result("fwd", a=2.0, b=4.0), result("fwd", a=9.0, b=8.0), result("bwd", a=0.5), result("bwd")]
    )
    assert lines == [
        "forward: 4.00 times the best peer (2.00 to 8.00, 2 cases)",
        "backward: 0.50 times the best peer (0.50 to 0.50, 1 cases)",
    ]


def test_the_suite_for_hopper_has_the_grid_and_the_short_sequences() -> None:
    cases = bench.hopper()
    assert len(cases) == 2 * (3 * 2 * 6 + 10 + 5) == len(set(cases))
    assert all(case.heads % case.heads_kv == 0 for case in cases)
    assert {case.batch * case.seq for case in cases if case.dtype == "bfloat16" and case.seq in (512, 1024)} == {
        1 << 14
    }
