"""``jitattn demo``: the same small transformer trained on jitattn and on torch's own attention, side by side.

Three copies of one character-level model start from the same weights and see the same batches in the same order:

    jitattn   every attention layer calls ``jitattn.attention``
    torch     every attention layer calls torch's scaled_dot_product_attention, as torch dispatches it
    math      the same, held to torch's plain (unfused) implementation

The third is the yardstick. Two correct implementations round differently and training amplifies that, so the curves
of "torch" and "math" draw apart too; how far is measured in this very run, and jitattn's curve has to stay within a
small multiple of it. The text is the reference manual that comes with Python itself, so nothing is downloaded.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
import textwrap
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import jitattn

from .transformer import Attend, Plan, Text, Transformer, validate, write_text

# Sized for a minute or two: on two CPU cores, and on one data-centre GPU.
CPU = Plan("cpu", "float32", steps=360, context=512, batch=2, layers=3, heads=4)
CUDA = Plan("cuda", "bfloat16", steps=600, context=1024, batch=16, layers=6, heads=8)


def plan_for(device: str, **asked: Any) -> Plan:
    """The plan for a kind of device, with what was asked for (and is not None) put in."""
    base = CUDA if device.startswith("cuda") else CPU
    return replace(base, device=device, **{name: value for name, value in asked.items() if value is not None})


BLOCK = 3  # steps that one model takes before the next one's turn
ROWS = 12  # rows of the printed table

# jitattn may be this many times as far from torch as torch's two implementations are from each other. In the CPU's
# standard run it is as far as they are (1e-6 after 360 steps), but in less tame training, without normalised queries
# and keys, the distances of correct pairs differed by a factor of 7. A scale that is 0.1 % off goes 30 times beyond.
MARGIN = 10
SETTLE = 10  # the first steps, whose drift is so small that one of them may show none


def run(plan: Plan, out: Path, machine: dict[str, Any]) -> int:
    """Train, compare, print, and write the run into the folder ``out``.

    ``machine`` describes where this runs and is stored with the results. Returns the exit status: 0, or 1 if the
    loss curves do not agree.
    """
    text = Text.load()
    print("jitattn demo: one transformer trained on jitattn and on torch's attention, side by side\n")
    device = torch.cuda.get_device_name(plan.device) if plan.device.startswith("cuda") else machine["cpu"]
    line("device", f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    line("text", f"pydoc_data.topics, {len(text.ids):,} characters, {len(text.alphabet)} distinct, each a token")
    lanes = make_lanes(plan, len(text.alphabet))
    size = sum(p.numel() for p in lanes[0].model.parameters())
    line(
        "model",
        f"{plan.layers} layers, {plan.heads} heads x {plan.head_dim}, {size / 1e6:.1f} M parameters, {plan.dtype}",
    )
    line("training", f"{plan.steps} steps of {plan.batch} x {plan.context} tokens")
    for lane in lanes:
        lane.first_call(text.batch(plan, 0))
    stats = jitattn.stats()
    seconds = f" in {stats['compile_seconds']:.1f} s" if stats["compiled"] else ""
    line("kernels", f"{stats['compiled']} compiled{seconds}, {stats['disk_hits']} from the cache")

    train(plan, text, lanes)

    ours, theirs, twin = lanes
    agreement = Agreement.of(ours.losses, theirs.losses, twin.losses)
    speed = {lane.name: round(plan.batch * plan.context / statistics.median(lane.seconds)) for lane in lanes}
    ratio = statistics.median(b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True))
    validation = {lane.name: validate(plan, text, lane.model) for lane in (ours, theirs)}
    sample = write_text(plan, text, ours.model)
    print()
    line("agreement", agreement.describe())
    line("", f"({MARGIN} x the drift between torch's own two implementations, measured in this run)")
    line("speed", f"{speed['jitattn']:,} tokens/s on jitattn, {speed['torch']:,} on torch: {ratio:.2f} x")
    line("", f"(medians of {len(ours.seconds)} turns of {min(BLOCK, plan.steps)} steps; x pairs neighbouring turns)")
    line("held-out", f"loss {validation['jitattn']:.4f} on jitattn, {validation['torch']:.4f} on torch")
    print("\nThe jitattn model writes:\n")
    print(textwrap.fill(sample, 100, initial_indent="    ", subsequent_indent="    "), end="\n\n")

    record = {
        "machine": machine,
        "plan": asdict(plan),
        "parameters": size,
        "kernels": jitattn.stats(),
        "tokens_per_second": speed,
        "ratio": ratio,
        "agreement": {**asdict(agreement), "agree": agreement.agree, "margin": MARGIN},
        "validation_loss": validation,
        "losses": {lane.name: lane.losses for lane in lanes},
        "sample": sample,
    }
    save(out, record)
    print("\nThe loss curves agree." if agreement.agree else "\nTHE LOSS CURVES DO NOT AGREE.")
    return 0 if agreement.agree else 1


@dataclass
class Lane:
    """One copy of the model with its optimiser and its record."""

    name: str
    model: Transformer
    optimiser: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)  # nats a character, one a step
    seconds: list[float] = field(default_factory=list)  # a step, one a block of steps

    def first_call(self, windows: Tensor) -> None:
        """Compile, and warm what torch keeps warm: one step without an update, one window as validation takes it."""
        self.model.loss(windows).backward()
        self.optimiser.zero_grad()
        with torch.no_grad():
            self.model.loss(windows[:1])

    def take(self, plan: Plan, step: int, batches: list[Tensor]) -> None:
        """Steps ``step``, ``step + 1``, ... on these batches."""
        synchronise(plan)
        start = time.perf_counter()
        losses = []
        for i, windows in enumerate(batches):
            warm_up, decay = min(1.0, (step + i + 1) / 20), math.cos(math.pi * (step + i) / plan.steps)
            for group in self.optimiser.param_groups:
                group["lr"] = plan.learning_rate * warm_up * (0.55 + 0.45 * decay)
            loss = self.model.loss(windows)
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            losses.append(loss.detach())
        synchronise(plan)
        self.seconds.append((time.perf_counter() - start) / len(batches))
        self.losses += torch.stack(losses).tolist()


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTIONS: dict[str, Attend] = {
    "jitattn": lambda q, k, v: jitattn.attention(q, k, v, causal=True),
    "torch": sdpa,
    "math": sdpa_kernel(SDPBackend.MATH)(sdpa),
}


def make_lanes(plan: Plan, alphabet: int) -> list[Lane]:
    """One for each of ATTENTIONS, all with the weights that the seed gives."""
    lanes = []
    for name, attend in ATTENTIONS.items():
        torch.manual_seed(plan.seed)
        model = Transformer(plan, alphabet, attend).to(plan.device)
        lanes.append(Lane(name, model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)))
    return lanes


def train(plan: Plan, text: Text, lanes: list[Lane]) -> None:
    """Every lane takes every step, in turns of BLOCK steps whose order rotates, while the table grows."""
    print(f"\n{'step':>6} {'jitattn':>9} {'torch':>9} {'difference':>11} {'allowed':>9} {'seconds':>8}")
    start, due = time.perf_counter(), 0
    with tqdm(total=plan.steps, unit="step", disable=None, leave=False) as bar:
        for turn, step in enumerate(range(0, plan.steps, BLOCK)):
            batches = [text.batch(plan, i) for i in range(step, min(step + BLOCK, plan.steps))]
            for i in range(len(lanes)):
                lanes[(turn + i) % len(lanes)].take(plan, step, batches)
            bar.update(len(batches))
            done, seconds = step + len(batches), time.perf_counter() - start
            late = seconds > 60 * plan.minutes
            if done >= due or done == plan.steps or late:
                due = done + max(1, plan.steps // ROWS)
                so_far = Agreement.of(*(lane.losses for lane in lanes))
                curves = f"{lanes[0].losses[-1]:9.4f} {lanes[1].losses[-1]:9.4f}"
                bounds = f"{so_far.difference[-1]:11.1e} {so_far.allowed[-1]:9.1e}"
                bar.write(f"{done:6} {curves} {bounds} {seconds:8.1f}")
            if late and done < plan.steps:
                bar.write(
                    f"stopped after {plan.minutes:g} minutes: this machine is slow or busy (--minutes allows more)"
                )
                break


def synchronise(plan: Plan) -> None:
    if plan.device.startswith("cuda"):
        torch.cuda.synchronize(plan.device)


@dataclass(frozen=True)
class Agreement:
    """Per step: |jitattn - torch|, and how large that may be."""

    difference: list[float]
    allowed: list[float]

    @classmethod
    def of(cls, ours: list[float], theirs: list[float], twin: list[float]) -> Agreement:
        """``allowed`` at a step is MARGIN times the largest |math - torch| up to it.

        The first SETTLE steps share one bound, and no bound is below MARGIN roundings of a float32 loss: an early
        difference can be zero by luck.
        """
        drift = [abs(a - b) for a, b in zip(twin, theirs, strict=True)]
        settled = max(torch.finfo(torch.float32).eps * max(theirs), *drift[:SETTLE])
        allowed = [MARGIN * largest for largest in accumulate(drift[1:], max, initial=settled)]
        return cls([abs(a - b) for a, b in zip(ours, theirs, strict=True)], allowed)

    @property
    def agree(self) -> bool:
        # Not "any(a > b)": a NaN loss must fail.
        return all(a <= b for a, b in zip(self.difference, self.allowed, strict=True))

    def describe(self) -> str:
        """The step that comes nearest to what is allowed."""
        i = max(range(len(self.allowed)), key=lambda i: self.difference[i] / self.allowed[i])
        return f"closest call: {self.difference[i]:.1e} apart at step {i + 1}, where {self.allowed[i]:.1e} is allowed"


def save(out: Path, record: dict[str, Any]) -> None:
    """Write run.json, curves.csv and, where matplotlib is installed, curves.png."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    losses: dict[str, list[float]] = record["losses"]
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *losses])
        writer.writerows([step, *row] for step, row in enumerate(zip(*losses.values(), strict=True), 1))
    line("saved", f"{out / 'run.json'}, {out / 'curves.csv'}")
    try:
        plot(out / "curves.png", record)
        line("", str(out / "curves.png"))
    except ImportError:
        line("", 'no plot: pip install "jitattn[plot]"')


def plot(path: Path, record: dict[str, Any]) -> None:
    """The two curves, and below them their difference beside what is allowed. Raises ImportError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(record["losses"]["torch"]) + 1)
    top.plot(steps, record["losses"]["torch"], color="0.6", linewidth=3, label="torch scaled_dot_product_attention")
    top.plot(steps, record["losses"]["jitattn"], color="tab:blue", linewidth=1, label="jitattn")
    top.set(ylabel="loss, nats a character", title=f"{record['ratio']:.2f} x torch's speed")
    bottom.semilogy(steps, record["agreement"]["allowed"], color="0.6", label="allowed")
    difference = [d or math.nan for d in record["agreement"]["difference"]]  # the axis has no zero
    bottom.semilogy(steps, difference, ".", color="tab:blue", label="|jitattn - torch|, where not 0")
    bottom.set(xlabel="step")
    for axis in (top, bottom):
        axis.legend()
    figure.savefig(path, dpi=150)


def line(label: str, value: str) -> None:
    print(f"{label:10} {value}")
