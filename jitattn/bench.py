"""``jitattn bench``: jitattn beside every peer that this machine can run, in one process.

Clock speeds drift and machines are shared, so times are never compared across processes or minutes: in each round
every implementation runs once, in an order that changes from round to round, and a peer's ratio is the median over
rounds of (its time / jitattn's time in that same round). Nothing is timed before its result is checked.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jitattn

from .peers import PEERS, Attend, Case, Passes, Peer

# How far from float64 a result may be and still be timed, in roundings of its largest value. It tells a wrong result
# from a right one; how exact the right ones are is for the tests to judge, and stands in bench.json.
ALLOWED = {"float32": 64, "bfloat16": 4, "float16": 4}

MIN_ROUNDS, MAX_ROUNDS = 5, 101
SAMPLE_SECONDS = 0.01  # a sample repeats its call until it lasts about this long


def run(
    cases: Sequence[Case],
    device: torch.device,
    out: Path,
    machine: dict[str, Any],
    *,
    peers: Iterable[str] | None = None,
    seconds: float = 2.0,
) -> int:
    """Measure every case, print a table row for each, write bench.json and bench.png into ``out``.

    ``machine`` describes where this runs and is stored with the results; ``peers`` picks from PEERS by name (None:
    all); ``seconds`` is the time that each implementation gets for a case, unless MIN_ROUNDS take longer. Returns the
    exit status: 0, or 1 if a result of jitattn was wrong or refused.
    """
    usable = []
    for peer in PEERS:
        reason = "not asked for" if peers is not None and peer.name not in peers else peer.missing(device)
        if reason is None:
            usable.append(peer)
        else:
            print(f"without {peer.name}: {reason}")
    print(
        f"{machine['cpu'] if device.type == 'cpu' else torch.cuda.get_device_name(device)}, torch {torch.__version__},"
        f" {torch.get_num_threads()} threads, CPU capability {torch.backends.cpu.get_cpu_capability()}\n"
        "ms are medians; x is a peer's time over jitattn's, the median of pairs taken in the same round\n"
    )
    heads = "".join(f" {peer.name + ' ms':>17} {'x':>6}" for peer in usable)
    shape = f"{'dtype':8} {'pass':7} {'mask':6} {'B':>5} {'H':>5} {'S':>6} {'D':>4}"
    print(f"{shape} {'jitattn ms':>11} {'GFLOP/s':>8} {'best x':>6}{heads}")
    results = []
    for case in cases:
        result = measure(case, usable, device, seconds)
        results.append(result)
        print(row(case, result, usable), flush=True)
    print("".join(f"\n{line}" for line in summary(results)))
    record = {"machine": machine, "device": str(device), "seconds": seconds, "results": results}
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"\nsaved {out / 'bench.json'}")
    try:
        plot(out / "bench.png", results, title=machine["cpu"] if device.type == "cpu" else str(device))
        print(f"saved {out / 'bench.png'}")
    except ImportError:
        print('no plot: pip install "jitattn[plot]"')
    return 1 if any("failure" in result for result in results) else 0


def grid(
    dtypes: Sequence[str],
    seqs: Sequence[int],
    head_dims: Sequence[int],
    causal: Sequence[bool],
    passes: Sequence[Passes],
    *,
    batch: int,
    heads: int,
    heads_kv: int | None = None,
    tokens: int | None = None,
    width: int | None = None,
) -> list[Case]:
    """Every combination. With `tokens` the batch is what makes up so many, with `width` the heads."""
    cases = []
    for dtype, direction, mask, head_dim, seq in itertools.product(dtypes, passes, causal, head_dims, seqs):
        rows = max(1, tokens // seq) if tokens else batch
        across = max(1, width // head_dim) if width else heads
        cases.append(Case(dtype, rows, across, across if width else heads_kv or heads, seq, head_dim, mask, direction))
    return cases


def hopper() -> list[Case]:
    """What docs/benchmarks/hopper.md is about: 16,384 tokens of width 2048, short sequences, and a few odd shapes."""
    both: tuple[Passes, ...] = ("fwd", "bwd")
    seqs = [512 << i for i in range(6)]
    cases = grid(
        ["bfloat16"], seqs, [64, 128, 256], [False, True], both, batch=0, heads=0, tokens=1 << 14, width=1 << 11
    )
    short = [(12, 64, 256), (16, 64, 256), (16, 64, 576), (16, 128, 256), (16, 128, 784)]
    odd = [  # batch, heads, heads_kv, seq, head dim, causal
        (2, 32, 8, 8192, 128, True), (4, 16, 16, 4096, 96, False), (4, 16, 16, 4096, 80, False),
        (1, 16, 16, 16384, 72, False), (4, 16, 16, 4001, 128, True),
    ]  # fmt: skip
    for one in both:
        cases += [Case("float16", b, h, h, s, d, False, one) for h, d, s in short for b in (64, 128)]
        cases += [Case("bfloat16", b, h, h_kv, s, d, mask, one) for b, h, h_kv, s, d, mask in odd]
    return cases


# ------------------------------------------------------------------------------------------------ measuring


def measure(case: Case, peers: Sequence[Peer], device: torch.device, seconds: float) -> dict[str, Any]:
    """Check, then time in rounds. The result is plain data; "failure" is in it if jitattn was wrong or refused."""
    inputs = make_inputs(case, device)
    result: dict[str, Any] = {"case": asdict(case), "skipped": {}}
    try:
        calls = {"jitattn": bind(lambda q, k, v: jitattn.attention(q, k, v, causal=case.causal), case, inputs)}
        outputs = {"jitattn": calls["jitattn"]()}
    except jitattn.JitattnError as error:
        return {**result, "failure": str(error)}
    for peer in peers:
        need, free = peer.scratch(case), free_bytes(device)
        if need > 0.8 * free:
            result["skipped"][peer.name] = f"needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
            continue
        try:
            call = bind(peer.prepare(case), case, inputs)
            outputs[peer.name] = call()
            calls[peer.name] = call
        except (RuntimeError, ImportError, AssertionError) as error:
            result["skipped"][peer.name] = (str(error) or repr(error)).splitlines()[0]
    errors, failure = check(case, inputs, outputs)
    result["errors"] = errors
    if failure:
        return {**result, "failure": failure}
    del outputs

    samples = sample(calls, device, seconds)
    result["seconds"] = samples
    result["median_seconds"] = {name: statistics.median(times) for name, times in samples.items()}
    result["gflops"] = {name: case.flops / t / 1e9 for name, t in result["median_seconds"].items()}
    result["ratio"] = {
        name: statistics.median(peer / own for peer, own in zip(times, samples["jitattn"], strict=False))
        for name, times in samples.items()
        if name != "jitattn"
    }
    return result


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and out's gradient
Call = Callable[[], tuple[Tensor, ...]]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Standard normal values, the same for a case on every run."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int) -> Tensor:
        values = torch.randn(case.batch, heads, case.seq, case.head_dim, generator=generator, device=device)
        return values.to(getattr(torch, case.dtype))

    q, k, v, dout = (normal(heads) for heads in (case.heads, case.heads_kv, case.heads_kv, case.heads))
    return (
        q.requires_grad_(case.backward),
        k.requires_grad_(case.backward),
        v.requires_grad_(case.backward),
        dout,
    )


def bind(attend: Attend, case: Case, inputs: Inputs) -> Call:
    """A call that returns (out,), or (out, dq, dk, dv)."""
    q, k, v, dout = inputs

    def forward() -> tuple[Tensor, ...]:
        return (attend(q, k, v),)

    def both() -> tuple[Tensor, ...]:
        out = attend(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    def backward() -> Call:
        out = attend(q, k, v)
        return lambda: (out, *torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

    if case.passes == "bwd":
        return backward()
    return both if case.backward else forward


def check(case: Case, inputs: Inputs, outputs: dict[str, tuple[Tensor, ...]]) -> tuple[dict[str, Any], str | None]:
    """The largest errors of every implementation, and what is wrong with jitattn's, None if nothing is.

    Against float64, for the last batch entry's last key head and its query heads: at most twice the error of the
    first peer, or what ALLOWED says. Against the first peer, everywhere: at most twice that, for both of them err.
    """
    group = case.heads // case.heads_kv
    parts = (slice(-1, None), slice(-group, None)), (slice(-1, None), slice(-1, None))
    q, k, v, dout = (x.detach()[parts[i]].double() for x, i in zip(inputs, (0, 1, 1, 0), strict=True))
    q, k, v = (x.requires_grad_(case.backward) for x in (q, k, v))
    exact = bind(
        lambda q, k, v: jitattn.attention(q, k, v, causal=case.causal, backend="reference"),
        case,
        (q, k, v, dout),
    )()
    names, errors, wrong = ("out", "dq", "dk", "dv"), {}, []
    for i, (name, truth) in enumerate(zip(names, exact, strict=False)):
        part = parts[1 if name in ("dk", "dv") else 0]
        errors[name] = {who: largest(tensors[i][part].double() - truth) for who, tensors in outputs.items()}
        who = next((who for who in outputs if who != "jitattn"), None)
        floor = ALLOWED[case.dtype] * torch.finfo(inputs[0].dtype).eps * largest(truth)
        limit = max(2 * errors[name][who], floor) if who else floor
        if not errors[name]["jitattn"] <= limit:
            wrong.append(f"{name} is off by {errors[name]['jitattn']:.2g}, allowed {limit:.2g}")
        if who:
            apart = largest(outputs["jitattn"][i].float() - outputs[who][i].float())
            if not apart <= 2 * limit:
                wrong.append(f"{name} is {apart:.2g} from {who}'s, allowed {2 * limit:.2g}")
    return errors, "; ".join(wrong) or None


def sample(calls: dict[str, Call], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Seconds a call, one entry a round. A slow implementation may take part in the first rounds only."""

    def timed(call: Call, repeat: int) -> float:
        return (on_gpu if device.type == "cuda" else on_cpu)(call, repeat) / repeat

    once = {name: timed(call, 1) for name, call in calls.items()}
    repeat = {name: max(1, math.ceil(SAMPLE_SECONDS / t)) for name, t in once.items()}
    rounds = {name: min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / (t * repeat[name])))) for name, t in once.items()}
    # Every round in which a peer runs needs its jitattn half.
    rounds["jitattn"] = max(rounds.values())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(max(rounds.values())):
        order = names[i % len(names) :] + names[: i % len(names)]
        for name in order if i % 2 else reversed(order):
            if i < rounds[name]:
                samples[name].append(timed(calls[name], repeat[name]))
    return samples


def largest(x: Tensor) -> float:
    return x.detach().abs().max().item()


def on_cpu(call: Call, repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return time.perf_counter() - start


def on_gpu(call: Call, repeat: int) -> float:
    """Between two events of the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def free_bytes(device: torch.device) -> float:
    """Memory that a call may still take; unlimited where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return math.inf


# ------------------------------------------------------------------------------------------------ report


def row(case: Case, result: dict[str, Any], peers: Sequence[Peer]) -> str:
    if "failure" in result:
        return f"{case}  FAILED: {result['failure']}"
    ms = {name: 1e3 * t for name, t in result["median_seconds"].items()}
    cells = "".join(
        f" {ms[peer.name]:17.3f} {result['ratio'][peer.name]:6.2f}" if peer.name in ms else f" {'-':>17} {'-':>6}"
        for peer in peers
    )
    best = f"{min(result['ratio'].values()):6.2f}" if result["ratio"] else f"{'-':>6}"
    notes = "".join(f"  ({name}: {reason})" for name, reason in result["skipped"].items())
    return f"{case} {ms['jitattn']:11.3f} {result['gflops']['jitattn']:8.0f} {best}{cells}{notes}"


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each pass: the ratio to the best peer of each case, as geometric mean and range."""
    best: dict[str, list[float]] = {}
    for result in results:
        if result.get("ratio"):
            best.setdefault(result["case"]["passes"], []).append(min(result["ratio"].values()))
    return [
        f"{_PASSES[one]}: {statistics.geometric_mean(ratios):.2f} times the best peer ({min(ratios):.2f} to "
        f"{max(ratios):.2f}, {len(ratios)} cases)"
        for one, ratios in best.items()
    ]


_PASSES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward + backward"}


def plot(path: Path, results: Sequence[dict[str, Any]], title: str) -> None:
    """GFLOP/s bars, one panel for each (dtype, pass, mask), the ratio to the first peer above jitattn's bar.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [result for result in results if "gflops" in result]
    if not done:
        return
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in done:
        case = result["case"]
        side = f"{case['dtype']}, {_PASSES[case['passes']]}"
        panels.setdefault((side, "causal" if case["causal"] else "full"), []).append(result)
    rows, columns = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    names = list(dict.fromkeys(name for result in done for name in result["gflops"]))
    figure = Figure(figsize=(6.5 * len(columns), 2.8 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for (side, mask), shown in panels.items():
        axis = axes[rows.index(side)][columns.index(mask)]
        for i, name in enumerate(names):
            heights = [result["gflops"].get(name, 0.0) for result in shown]
            at = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(shown))]
            bars = axis.bar(at, heights, 0.8 / len(names), label=name)
            if name == "jitattn":
                ratios = [next(iter(result["ratio"].values()), None) for result in shown]
                axis.bar_label(bars, [f"{r:.2f}x" if r else "" for r in ratios], fontsize=7)
        axis.set_xticks(range(len(shown)), [f"S{r['case']['seq']}\nD{r['case']['head_dim']}" for r in shown])
        axis.set_title(f"{side}, {mask}", fontsize=9)
        axis.set_ylabel("GFLOP/s")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
