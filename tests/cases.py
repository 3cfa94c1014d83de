"""THE list of attention problems that every numerics test runs, on every backend.

A Case fixes shapes, dtype, causal alignment, memory layout and the kind of values, all reproducible from the case
alone. The lists below are grouped by what they are after. A new kernel is correct when it passes all of them.

Each distinct (dtype, head_dim, head_dim_v, causal) costs a compilation or two, so the sweeps share few of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Literal

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Causal = Literal[False, "top_left", "bottom_right"]
CAUSAL: tuple[Causal, ...] = (False, "top_left", "bottom_right")
PLAIN = "bhsd"

# How a (B, H, S, D) tensor may lie in memory. The last group repeats values, so it changes what the tensor holds.
LAYOUTS = ("bhsd", "bshd", "sbhd", "bhds", "packed", "padded", "strided", "odd")
EXPANDED = ("expand_batch", "expand_heads", "expand_seq", "expand_dim", "expand_all", "overlap")

FILLS = ("normal", "sharp", "high", "low", "mixed", "ramp_up", "ramp_down", "edges", "constant", "tiny", "zeros")


@dataclass(frozen=True)
class Case:
    """One attention problem with its values. causal is False, "top_left" or "bottom_right"; scale None is 1/sqrt(D).

    ``layouts`` are those of q, k, v and the output's gradient; ``fill`` is the kind of values (see ``_values``).
    """

    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads_q: int = 2
    heads_kv: int = 2
    seq_q: int = 75
    seq_kv: int = 141
    head_dim: int = 64
    head_dim_v: int = 64
    causal: Causal = False
    scale: float | None = None
    layouts: tuple[str, str, str, str] = (PLAIN, PLAIN, PLAIN, PLAIN)
    fill: str = "normal"

    def __str__(self) -> str:
        """A short, unique name; parts at their usual value are left out."""
        parts = [str(self.dtype).removeprefix("torch."), f"b{self.batch}", f"h{self.heads_q}"]
        parts += [f"kv{self.heads_kv}"] if self.heads_kv != self.heads_q else []
        parts += [f"{self.seq_q}x{self.seq_kv}", f"d{self.head_dim}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        parts += [str(self.causal)] if self.causal else []
        parts += [f"scale{self.scale:g}"] if self.scale is not None else []
        if len(set(self.layouts)) == 1:
            parts += [self.layouts[0]] if self.layouts[0] != PLAIN else []
        else:
            parts += ["/".join(self.layouts)]
        parts += [self.fill] if self.fill != "normal" else []
        return "-".join(parts)

    @property
    def softmax_scale(self) -> float:
        """The scale in force."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def diagonal(self) -> int | None:
        """Key n is visible to row m iff n <= m + diagonal; None when nothing is masked."""
        if not self.causal:
            return None
        return 0 if self.causal == "top_left" else self.seq_kv - self.seq_q


@dataclass(frozen=True)
class Inputs:
    """A case's tensors, with the output's gradient (B, Hq, Sq, Dv) and the LSE's (B, Hq, Sq, float32)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """The case's tensors, the same each time: its name seeds the generator."""
    rng = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    q = normal(case.batch, case.heads_q, case.seq_q, case.head_dim)
    k = normal(case.batch, case.heads_kv, case.seq_kv, case.head_dim)
    v = normal(case.batch, case.heads_kv, case.seq_kv, case.head_dim_v)
    q, k, v = _values(case, q, k, v)
    dout = normal(case.batch, case.heads_q, case.seq_q, case.head_dim_v)
    dlse = normal(case.batch, case.heads_q, case.seq_q)
    q, k, v, dout = (
        arrange(tensor.to(device=device, dtype=case.dtype), layout)
        for tensor, layout in zip((q, k, v, dout), case.layouts, strict=True)
    )
    return Inputs(q, k, v, dout, dlse.to(device=device, dtype=torch.float32))


def _values(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn N(0, 1) values into those that case.fill names."""
    if case.fill == "normal":
        return q, k, v
    if case.fill == "sharp":  # nearly all of a row's weight on one key
        return q * 4, k * 4, v
    if case.fill == "edges":  # the first and last few keys carry much of every row: a dropped one shows
        weight = torch.ones(case.seq_kv, dtype=torch.float64)
        weight[:2] = weight[-2:] = 8
        return q, k * 0.5, v * weight[:, None]
    if case.fill == "constant":  # equal keys, equal values: out is exactly v, LSE grows with the number of keys
        return q, torch.ones_like(k) * 0.5, torch.ones_like(v)
    if case.fill == "tiny":
        return q * 2**-6, k * 2**-6, v * 2**-6
    if case.fill == "zeros":
        return q * 0, k * 0, v

    # Shift every score by about 120, far past where exp() of a float32 score over- or underflows (88).
    shift = math.sqrt(120 / max(case.head_dim * abs(case.softmax_scale), 0.15))
    sign = torch.ones(case.seq_q, dtype=torch.float64)
    along_keys = torch.ones(case.seq_kv, dtype=torch.float64)
    if case.fill == "low":
        sign = -sign
    elif case.fill == "mixed":
        sign[::2] = -1
    elif case.fill == "ramp_up":  # the running maximum rises in every block of keys
        along_keys = torch.linspace(-1, 1, case.seq_kv, dtype=torch.float64)
    elif case.fill == "ramp_down":  # the first block holds the maximum, later ones underflow
        along_keys = torch.linspace(1, -1, case.seq_kv, dtype=torch.float64)
    elif case.fill != "high":
        raise ValueError(f"unknown fill {case.fill!r}")
    return q + shift * sign[:, None], k + shift * along_keys[:, None], v


def arrange(x: Tensor, layout: str) -> Tensor:
    """The (B, H, S, D) tensor x with the same values laid out as named, NaN in the memory around and between them.

    The layouts in EXPANDED repeat part of x instead (stride 0, or overlapping rows).
    """
    b, h, s, d = x.shape
    if layout == "bhsd":
        return x.contiguous()
    if layout in _ORDERS:
        order = _ORDERS[layout]
        back = [order.index(dim) for dim in range(4)]
        return x.permute(order).contiguous().permute(back)
    if layout == "packed":  # the middle third of a fused (B, S, 3, H, D) projection
        return _nan(x, b, s, 3, h, d)[:, :, 1].transpose(1, 2).copy_(x)
    if layout == "padded":  # a window of a larger tensor: every stride odd, every edge next to NaN
        return _nan(x, b + 2, h + 2, s + 5, d + 3)[1 : 1 + b, 1 : 1 + h, 2 : 2 + s, 1 : 1 + d].copy_(x)
    if layout == "strided":  # every other element of every other row
        return _nan(x, b, h, 2 * s + 1, 2 * d)[:, :, 1::2, ::2][:, :, :s].copy_(x)
    if layout == "odd":  # contiguous but at an odd storage offset
        return _nan(x, x.numel() + 2)[1 : 1 + x.numel()].view(x.shape).copy_(x)
    if layout == "expand_batch":
        return x[:1].expand(b, h, s, d)
    if layout == "expand_heads":
        return x[:, :1].expand(b, h, s, d)
    if layout == "expand_seq":
        return x[:, :, :1].expand(b, h, s, d)
    if layout == "expand_dim":
        return x[..., :1].contiguous().expand(b, h, s, d)
    if layout == "expand_all":
        return x.flatten()[:1].view(1, 1, 1, 1).expand(b, h, s, d) if x.numel() else x
    if layout == "overlap":  # row m + 1 starts one element after row m
        line = torch.cat([x.flatten(), x.new_zeros(1)])[: max(b * h + s + d, 1)].clone()
        return line.as_strided(x.shape, (h, 1, 1, 1)) if x.numel() >= b * h + s + d else x
    raise ValueError(f"unknown layout {layout!r}")


# layout name -> the dimensions of (B, H, S, D) from the slowest to the fastest in memory
_ORDERS = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhds": (0, 1, 3, 2)}


def _nan(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def all_layouts(layout: str) -> tuple[str, str, str, str]:
    return (layout, layout, layout, layout)


def _spread(n: int, multiplier: int, modulus: int) -> int:
    """A length that visits every residue as n does, but in another order."""
    return (n * multiplier) % modulus + 1


def _head_dims() -> Iterator[Case]:
    """Every kind of head dim, each in one dtype by turns, the common ones in all."""
    odd = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 63, 65, 72, 95, 100, 127, 129, 160, 255, 257, 320)
    masks: tuple[Causal, ...] = (False, "bottom_right")
    kinds: Iterator[tuple[torch.dtype, Causal]] = cycle((dtype, causal) for causal in masks for dtype in DTYPES)
    for dim, (dtype, causal) in zip(odd, kinds, strict=False):
        yield Case(dtype, heads_kv=1, head_dim=dim, head_dim_v=dim, causal=causal)
    for dim in (32, 40, 80, 96, 128, 192, 256):
        for dtype in DTYPES if dim in (128, 96) else DTYPES[:2]:
            yield Case(dtype, heads_kv=1, head_dim=dim, head_dim_v=dim, causal="bottom_right", fill="edges")
    for dim, dim_v in ((64, 32), (32, 80), (192, 128), (1, 7), (17, 1), (16, 256)):
        dtype, causal = next(kinds)
        yield Case(dtype, heads_kv=1, head_dim=dim, head_dim_v=dim_v, causal=causal)
    yield Case(torch.bfloat16, head_dim=576, head_dim_v=512, heads_q=4, heads_kv=1, causal="bottom_right")


def _lengths() -> Iterator[Case]:
    """Every query length and every key length from 1 to 130, and around the multiples of 64 and 96 after it."""
    for n in range(1, 131):
        other = _spread(n, 37, 131)
        yield Case(torch.float32, heads_q=1, heads_kv=1, seq_q=n, seq_kv=other, fill="edges")
        yield Case(torch.bfloat16, heads_q=1, heads_kv=1, seq_q=other, seq_kv=n, causal="bottom_right")
        if n % 2:
            yield Case(torch.bfloat16, heads_q=1, heads_kv=1, seq_q=n, seq_kv=n, fill="edges")
            yield Case(torch.float32, heads_q=1, heads_kv=1, seq_q=n, seq_kv=other, causal="top_left")
    for centre in (192, 256, 384):
        for step in range(16):
            n, other = centre - 8 + step, centre - 8 + (step * 5 + 3) % 16
            yield Case(torch.float32, heads_q=1, heads_kv=1, seq_q=n, seq_kv=other, causal="bottom_right")
            yield Case(torch.bfloat16, heads_q=1, heads_kv=1, seq_q=other, seq_kv=n, fill="edges")


def _shapes() -> Iterator[Case]:
    """Grouped heads, long and lopsided lengths, both causal alignments, empty rows."""
    for heads_q, heads_kv in ((1, 1), (6, 2), (8, 1), (3, 3), (12, 4)):
        for causal in CAUSAL:
            dtype = torch.bfloat16 if causal == "top_left" else torch.float32
            yield Case(dtype, batch=3, heads_q=heads_q, heads_kv=heads_kv, seq_q=33, seq_kv=70, causal=causal)
    for seq_q, seq_kv in ((1, 1), (1, 2000), (1, 1025), (2, 513), (700, 5), (1000, 1), (300, 129), (129, 700)):
        for causal in CAUSAL:
            dtype = torch.float32 if (seq_q + seq_kv) % 2 else torch.bfloat16
            yield Case(dtype, heads_q=3, heads_kv=1, seq_q=seq_q, seq_kv=seq_kv, causal=causal, fill="edges")
    for length in (255, 256, 257, 300, 513):  # enough heads for the largest tiles
        yield Case(torch.float32, heads_q=8, heads_kv=2, seq_q=length, seq_kv=200, causal="top_left", fill="edges")
        yield Case(torch.bfloat16, batch=2, heads_q=4, heads_kv=4, seq_q=length, seq_kv=length)
    for length in (784, 1024, 1537):
        yield Case(torch.float32, seq_q=length, seq_kv=length, causal="bottom_right", fill="edges")
        yield Case(torch.bfloat16, heads_kv=1, seq_q=length, seq_kv=length)
    yield Case(torch.bfloat16, heads_q=1, heads_kv=1, seq_q=2500, seq_kv=2500, causal="top_left", fill="edges")
    yield Case(torch.float16, batch=2, heads_kv=1, seq_q=300, seq_kv=400, causal="bottom_right")
    yield Case(torch.float16, batch=2, heads_kv=1, seq_q=260, seq_kv=260, fill="edges")


def _empty() -> Iterator[Case]:
    """Sizes of 0 in every place where 0 is a size."""
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    for name in ("batch", "seq_q", "seq_kv"):
        for causal, dtype in zip(CAUSAL, dtypes, strict=True):
            yield replace(Case(dtype, batch=2, seq_q=9, seq_kv=9, causal=causal), **{name: 0})
    yield Case(heads_q=0, heads_kv=0, seq_q=9, seq_kv=9)
    yield Case(heads_q=0, heads_kv=2, seq_q=9, seq_kv=9)
    yield Case(seq_q=0, seq_kv=0, causal="bottom_right")
    yield Case(batch=0, seq_q=0, seq_kv=0)


def _layouts() -> Iterator[Case]:
    """Every memory layout, for all tensors and then mixed."""
    shape = Case(batch=2, heads_q=4, heads_kv=2, seq_q=37, seq_kv=83)
    for layout in LAYOUTS[1:] + EXPANDED:
        yield replace(shape, layouts=all_layouts(layout), causal="bottom_right")
        yield replace(shape, layouts=all_layouts(layout), dtype=torch.bfloat16)
    yield replace(shape, layouts=all_layouts("odd"), dtype=torch.float16, causal="bottom_right")
    yield replace(shape, layouts=all_layouts("padded"), dtype=torch.float16)
    every = LAYOUTS + EXPANDED
    for index in range(len(every)):
        picked = [every[(index * step + offset) % len(every)] for step, offset in ((1, 0), (3, 1), (5, 2), (9, 3))]
        dtype, causal = (torch.float32, False) if index % 2 else (torch.bfloat16, "bottom_right")
        yield replace(shape, dtype=dtype, causal=causal, layouts=(picked[0], picked[1], picked[2], picked[3]))
    # Stride-0 keys and values with one key past a multiple of 32 broke others.
    yield replace(shape, layouts=(PLAIN, "expand_seq", "expand_seq", PLAIN), seq_kv=97)
    yield replace(shape, layouts=(PLAIN, "expand_heads", "expand_heads", "expand_all"), seq_kv=65)


def _values_and_scales() -> Iterator[Case]:
    """Score magnitudes past every overflow, and scales that are 0, negative or large."""
    shape = Case(batch=2, heads_q=2, heads_kv=1, seq_q=100, seq_kv=193)
    for fill in FILLS[1:]:
        for causal in CAUSAL:
            dtype = torch.bfloat16 if (FILLS.index(fill) + CAUSAL.index(causal)) % 2 else torch.float32
            yield replace(shape, fill=fill, causal=causal, dtype=dtype)
    for fill in ("low", "mixed", "ramp_up"):  # more rows than keys: the first rows see nothing
        yield replace(shape, seq_q=193, seq_kv=100, fill=fill, causal="bottom_right")
        yield replace(shape, seq_q=193, seq_kv=100, fill=fill, causal="bottom_right", dtype=torch.bfloat16)
        # A length of 64 modulo 128 with an LSE below -88 broke others.
        yield replace(shape, seq_q=192, seq_kv=192, fill=fill, causal="bottom_right")
    for scale in (0.0, -0.125, 1.0, -2.0, 1e-6, 100.0):
        yield replace(shape, scale=scale, causal="bottom_right")
        yield replace(shape, scale=scale, dtype=torch.bfloat16)
    for fill in ("sharp", "low", "ramp_up", "tiny"):
        yield replace(shape, fill=fill, dtype=torch.float16, causal="bottom_right")


HEAD_DIMS = tuple(_head_dims())
LENGTHS = tuple(_lengths())
SHAPES = tuple(_shapes())
EMPTY = tuple(_empty())
LAYOUT_CASES = tuple(_layouts())
VALUES = tuple(_values_and_scales())
ALL = HEAD_DIMS + LENGTHS + SHAPES + EMPTY + LAYOUT_CASES + VALUES

# A few that touch every path, for runs under another instruction set or another compiler.
SMOKE = (
    Case(torch.float32, batch=2, heads_q=4, heads_kv=2, seq_q=75, seq_kv=141, causal="bottom_right", fill="edges"),
    Case(torch.float32, seq_q=193, seq_kv=100, fill="mixed", causal="bottom_right", layouts=all_layouts("padded")),
    Case(torch.bfloat16, batch=2, heads_q=4, heads_kv=2, seq_q=131, seq_kv=200, fill="edges"),
    Case(torch.bfloat16, seq_q=64, seq_kv=65, fill="low", layouts=all_layouts("bshd")),
    Case(torch.float16, seq_q=65, seq_kv=130, head_dim=40, head_dim_v=72, causal="top_left"),
    Case(torch.float32, seq_q=50, seq_kv=51, head_dim=17, head_dim_v=17),
)


def variant(case: Case) -> tuple[object, ...]:
    """What decides how many kernels a list of cases compiles at the least."""
    return case.dtype, case.head_dim, case.head_dim_v, bool(case.causal)
