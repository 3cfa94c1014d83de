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
from collections.abc import Callable
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

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, S, D) -> (B, H, S, D), causal


@dataclass(frozen=True)
class Plan:
    """What is trained. One step sees ``batch`` windows of ``context`` characters."""

    device: str
    dtype: str
    steps: int
    context: int
    batch: int
    layers: int
    heads: int
    head_dim: int = 64
    seed: int = 0
    minutes: float = 4.0  # training stops early after so long
    learning_rate: float = 2e-3


# Sized for a minute or two: on two CPU cores, and on one data-centre GPU.
CPU = Plan("cpu", "float32", steps=360, context=512, batch=2, layers=3, heads=4)
CUDA = Plan("cuda", "bfloat16", steps=600, context=1024, batch=16, layers=6, heads=8)


def plan_for(device: str, **asked: Any) -> Plan:
    """The plan for a kind of device, with what was asked for (and is not None) put in."""
    base = CUDA if device.startswith("cuda") else CPU
    return replace(base, device=device, **{name: value for name, value in asked.items() if value is not None})


BLOCK = 3  # steps that one model takes before the next one's turn
ROWS = 12  # rows of the printed table
HELD_OUT = 0.1  # the last part of the text, for validation
VALIDATION_WINDOWS = 8
SAMPLE_LENGTH = 200

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


@dataclass(frozen=True)
class Text:
    """The characters, numbered: ``ids`` is (N,) int64, never trained on from ``split``."""

    alphabet: str
    ids: Tensor
    split: int

    @classmethod
    def load(cls) -> Text:
        """Python's reference manual. Raises JitattnError where a stripped-down Python comes without it."""
        try:
            from pydoc_data.topics import topics
        except ImportError:
            reason = "this Python comes without pydoc_data.topics, the text to train on; most others have it"
            raise jitattn.JitattnError(reason) from None
        # Lines of asterisks underline titles, and much of the rest is indentation: neither is worth learning.
        text = "\n".join(" ".join(topics[key].replace("*", "").split()) for key in sorted(topics))
        alphabet = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(alphabet)}
        ids = torch.tensor([number[character] for character in text])
        return cls(alphabet, ids, split=round(len(ids) * (1 - HELD_OUT)))

    def windows(self, starts: list[int], plan: Plan) -> Tensor:
        """(len(starts), context + 1) int64 on the plan's device."""
        return torch.stack([self.ids[i : i + plan.context + 1] for i in starts]).to(plan.device)

    def batch(self, plan: Plan, step: int) -> Tensor:
        """The training windows of a step: a function of (seed, step) alone."""
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        starts = torch.randint(self.split - plan.context - 1, (plan.batch,), generator=generator)
        return self.windows(starts.tolist(), plan)


class Linear(nn.Linear):
    """A linear map computed in its input's dtype; the weight itself stays float32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


class Block(nn.Module):
    """Causal self-attention with rotary positions, then a two-layer perceptron."""

    def __init__(self, plan: Plan, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend, width = plan.heads, attend, plan.heads * plan.head_dim
        self.to_qkv, self.from_heads = Linear(width, 3 * width, bias=False), Linear(width, width, bias=False)
        self.up, self.down = Linear(width, 2 * width, bias=False), Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, S, W) -> (B, S, W)."""
        qkv = self.to_qkv(norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D), a view
        # Normalised queries and keys keep training from amplifying differences of rounding.
        mixed = self.attend(rotate(norm(q), rotation), rotate(norm(k), rotation), v)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(norm(x))))


class Transformer(nn.Module):
    def __init__(self, plan: Plan, alphabet: int, attend: Attend) -> None:
        super().__init__()
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.embed = nn.Embedding(alphabet, plan.heads * plan.head_dim)
        self.blocks = nn.ModuleList(Block(plan, attend) for _ in range(plan.layers))
        self.to_logits = Linear(plan.heads * plan.head_dim, alphabet, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)
        for weight in self.blocks.parameters():
            nn.init.normal_(weight, std=self.embed.embedding_dim**-0.5)
        frequency = 10_000.0 ** -(torch.arange(0, plan.head_dim, 2) / plan.head_dim)
        self.register_buffer("angle", torch.arange(plan.context)[:, None] * frequency, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, S) -> float32 logits (B, S, alphabet)."""
        angle: Tensor = self.angle[: ids.shape[1]]  # type: ignore[index]
        rotation = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = self.embed(ids).to(self.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return self.to_logits(norm(x)).float()

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a character, of each character of windows (B, S + 1) given those before."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """x (..., S, D), each pair (i, i + D/2) turned by the position's angle i."""
    (a, b), (cos, sin) = x.chunk(2, -1), rotation
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


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


@torch.no_grad()
def validate(plan: Plan, text: Text, model: Transformer) -> float:
    """Mean loss over windows spread evenly over the held-out text."""
    room = len(text.ids) - plan.context - 1
    starts = torch.linspace(min(text.split, room), room, VALIDATION_WINDOWS).long().tolist()
    return statistics.fmean(model.loss(text.windows([i], plan)).item() for i in starts)


@torch.no_grad()
def write_text(plan: Plan, text: Text, model: Transformer, prompt: str = "The ") -> str:
    """Sample SAMPLE_LENGTH characters after the prompt, at temperature 0.7."""
    generator = torch.Generator().manual_seed(plan.seed)
    ids = [text.alphabet.index(character) for character in prompt]
    for _ in range(SAMPLE_LENGTH):
        seen = ids[-plan.context :]
        # Padded to the full context, so that the kernels of training serve; a causal model cannot see the padding.
        padded = torch.tensor([seen + [0] * (plan.context - len(seen))], device=plan.device)
        odds = torch.softmax(model(padded)[0, len(seen) - 1] / 0.7, -1).cpu()
        ids.append(int(torch.multinomial(odds, 1, generator=generator)))
    return "".join(text.alphabet[i] for i in ids)


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
