"""The demo's subject: a small character-level transformer, the text that it learns, and what it has learnt.

Its attention is a function that it is given.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import JitattnError

__all__ = ["Attend", "Plan", "Text", "Transformer", "validate", "write_text"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, S, D) -> (B, H, S, D), causal

HELD_OUT = 0.1  # the last part of the text, for validation
VALIDATION_WINDOWS = 8
SAMPLE_LENGTH = 200


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
            raise JitattnError(reason) from None
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
