"""Which blocks of query rows the blocks of Hopper's forward kernel take: each of them once, whatever is launched."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from jitattn import params
from jitattn.config import KernelConfig
from jitattn.target import parse
from tests import emulator

pytestmark = emulator.ONLY_HERE

BLOCK_M, HEAD_DIMS = (64, 128, 192), (64, 128, 256)
CACHE_BYTES = 32 << 20  # of tiles.h

# The kernels' own text and parameters, but a block writes down what it would work on. `splits` says for which tiles.
RECORD = """
#line 1 "<entry>"
template <i32 rows, bool is_causal, i32 dim>
struct Shape : Config {
  static constexpr i32 block_m = rows, head_dim = dim, head_dim_v = dim;
  static constexpr bool causal = is_causal;
};
struct Record {
  struct Memory {
    i32 nothing;
  };
  template <class C>
  static METHOD void note(i32 block, Params const& p) {
    auto* count = reinterpret_cast<i32*>(p.workspace);
    for (attn::Tiles<C, Params> work(p); work.more(); work.next()) {
      const attn::QueryBlock b = work.tile();
      const i64 seen[] = {block, b.batch, b.head, b.head_kv, b.first, b.rows, b.split};
      if (*count < (i32)p.k_batch)
        for (i32 i = 0; i < 7; ++i) count[1 + *count * 7 + i] = (i32)seen[i];
      ++*count;
    }
  }
  static METHOD void run(i32 block, Memory&, Params const& p) {
    if (ptx::thread_index() != 0) return;
    switch ((i32)p.splits) {
CASES
    }
  }
};
JITATTN_ENTRY(Record, Params)
"""
SHAPES = [(rows, causal, dim) for rows in BLOCK_M for causal in (False, True) for dim in HEAD_DIMS]


@dataclass(frozen=True)
class Work:
    """A launch."""

    blocks: int
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    seq_q: int = 1
    seq_kv: int = 1
    head_dim: int = 64


@functools.cache
def text() -> str:
    tile = {"warps": 12, "stages": 2, "blocks_per_unit": 1, "turns": True, "query_stages": 2}
    config = KernelConfig("forward_warpgroups", "bfloat16", 64, 64, True, 128, 128, tuple(tile.items()))
    whole = emulator.assemble(config, parse("sm_90a"))
    before, entry, _ = whole.partition('#line 1 "<entry>"')
    assert entry
    cases = [
        f"      case {i}: return note<Shape<{rows}, {str(causal).lower()}, {dim}>>(block, p);"
        for i, (rows, causal, dim) in enumerate(SHAPES)
    ]
    return before + RECORD.replace("CASES", "\n".join(cases))


def taken(work: Work, block_m: int, causal: bool, seed: int = 0) -> list[tuple[int, ...]]:
    """Block, batch, head, key head, first row, rows, split: in the order in which they are taken."""
    most = work.batch * work.heads_q * -(-work.seq_q // block_m) + 8
    seen = torch.zeros(1 + 7 * most, dtype=torch.int32)
    table = params.FORWARD_BY_BOXES
    sizes = {name: getattr(work, name) for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv")}
    values = dict.fromkeys(table.integers, 0) | sizes | {"scale": 1.0, "k_batch": most}
    parameters = bytearray(table.parameters(values | {"splits": SHAPES.index((block_m, causal, work.head_dim))}))
    addresses = [seen.data_ptr() if name == "workspace" else 0 for name in table.pointers]
    pointers = table.pack_pointers().pack(*addresses)
    parameters[: len(pointers)] = pointers
    regions = [emulator.region("seen", seen, writable=True)]
    emulator.run(text(), bytes(parameters), work.blocks, regions, threads=32, seed=seed)
    count = int(seen[0])
    assert count <= most, f"{count} blocks of rows were taken, of at most {most - 8}"
    return [tuple(each) for each in seen[1 : 1 + 7 * count].view(-1, 7).tolist()]


def check(work: Work, block_m: int, causal: bool, seed: int = 0) -> None:
    seen = taken(work, block_m, causal, seed)
    firsts = range(0, work.seq_q, block_m)
    group = work.heads_q // work.heads_kv
    wanted = {
        (batch, head, head // group, first, min(block_m, work.seq_q - first), 0)
        for batch in range(work.batch)
        for head in range(work.heads_q)
        for first in firsts
    }
    times = Counter(each[1:] for each in seen)
    assert set(times) == wanted, (
        f"missing {sorted(wanted - set(times))[:3]}, too many {sorted(set(times) - wanted)[:3]}"
    )
    assert max(times.values()) == 1, f"taken by several: {times.most_common(3)}"
    # The most that a block takes, if all take their share: under a mask it comes in twos.
    at_once = 2 if causal else 1
    most = max(Counter(each[0] for each in seen).values())
    pieces = work.batch * work.heads_q * -(-len(firsts) // at_once)
    assert most <= at_once * -(-pieces // work.blocks)


def heads_at_once(work: Work) -> int:
    """Query heads whose keys and values the cache holds."""
    bytes_ = work.seq_kv * 2 * work.head_dim * 2
    return max(1, CACHE_BYTES // bytes_) * (work.heads_q // work.heads_kv)


# Lengths in blocks of rows, and rows more or less than that.
LENGTHS = [(1, -63), (1, -1), (1, 0), (1, 1), (2, 0), (3, -1), (3, 0), (5, 1), (7, 0)]
LENGTHS += [(31, 0), (32, 1), (33, 0), (34, 0)]  # from 33 on odd numbers are paired as well
GRIDS = (1, 2, 3, 7, 8, 64, 131, 132)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block_m", BLOCK_M)
def test_every_block_of_rows_is_taken_once(block_m: int, causal: bool) -> None:
    rng = random.Random(block_m + causal)
    for blocks, more in LENGTHS:
        for grid in GRIDS:
            heads_kv = rng.choice((1, 2, 3, 5, 8))
            work = Work(
                grid, rng.randint(1, 5), heads_kv * rng.choice((1, 1, 2, 3, 8)), heads_kv,
                max(1, blocks * block_m + more), rng.choice((1, 700, 4096, 131072)), rng.choice(HEAD_DIMS),
            )  # fmt: skip
            check(work, block_m, causal, seed=grid)


@pytest.mark.parametrize("heads", [1, 2, 3, 16, 48, 131, 132, 200])
def test_many_heads(heads: int) -> None:
    for group in {group for group in (1, 4, heads) if heads % group == 0}:
        for causal in (False, True):
            for seq_q in (1, 129, 300):
                for grid in (1, 13, 132):
                    check(Work(grid, 2, heads, heads // group, seq_q, 8192, 128), 128, causal)


# Odd numbers of blocks of rows under a mask, and keys so many that the heads are taken in sections, the last of which
# may be smaller.
SECTIONS = [
    Work(132, batch=3, heads_q=11, heads_kv=11, seq_q=300, seq_kv=30_000, head_dim=64),
    Work(132, batch=1, heads_q=5, heads_kv=5, seq_q=300, seq_kv=50_000, head_dim=64),
    Work(5, batch=1, heads_q=7, heads_kv=7, seq_q=640, seq_kv=50_000, head_dim=64),
    Work(17, batch=2, heads_q=20, heads_kv=4, seq_q=900, seq_kv=20_000, head_dim=128),
    Work(3, batch=5, heads_q=3, heads_kv=1, seq_q=1000, seq_kv=40_000, head_dim=256),
    Work(29, batch=1, heads_q=9, heads_kv=3, seq_q=1, seq_kv=70_000, head_dim=256),
    Work(132, batch=2, heads_q=7, heads_kv=7, seq_q=31 * 64, seq_kv=30_000, head_dim=128),
]


@pytest.mark.parametrize("block_m", BLOCK_M)
@pytest.mark.parametrize("work", SECTIONS, ids=str)
def test_heads_in_sections(work: Work, block_m: int) -> None:
    check(work, block_m, True)


def test_random_sections() -> None:
    rng = random.Random(0)
    sections, smaller = 0, 0
    for i in range(150):
        block_m, heads_kv = rng.choice(BLOCK_M), rng.randint(1, 12)
        blocks = rng.choice((1, 3, 5, 7, 9))
        work = Work(
            rng.randint(1, 132), rng.randint(1, 5), heads_kv * rng.choice((1, 2, 3)), heads_kv,
            block_m * blocks - rng.choice((0, 1, block_m - 1)), rng.randint(10_000, 70_000), rng.choice(HEAD_DIMS),
        )  # fmt: skip
        check(work, block_m, True, seed=i)
        together, heads = heads_at_once(work), work.batch * work.heads_q
        sections += 1 < together < heads
        smaller += 1 < together < heads and heads % together > 0
    assert sections > 60 and smaller > 20, "not what this test is for"


def test_the_last_rows_of_a_section_come_first() -> None:
    work = Work(4, batch=1, heads_q=10, heads_kv=5, seq_q=5 * 128, seq_kv=60_000, head_dim=64)
    together = heads_at_once(work)
    assert together == 4
    seen = taken(work, 128, True)
    order = {}
    for block in range(work.blocks):
        own = [each for each in seen if each[0] == block]
        for round_, (_, _, head, _, first, _, _) in enumerate(own):
            place = work.blocks - 1 - block if round_ % 2 else block
            order[round_ * work.blocks + place] = head, first
    heads = [range(begin, min(begin + together, 10)) for begin in range(0, 10, together)]
    wanted = [(head, first) for section in heads for first in range(4 * 128, -1, -128) for head in section]
    assert [order[i] for i in range(len(wanted))] == wanted


def test_pairs_take_alike() -> None:
    """Under a mask the two blocks of rows that follow each other are from both ends."""
    seen = taken(Work(6, batch=1, heads_q=6, heads_kv=2, seq_q=6 * 64 - 5), 64, True)
    for block in range(6):
        own = [each[4] // 64 for each in seen if each[0] == block]
        assert len(own) % 2 == 0 and all(a + b == 5 and a > b for a, b in zip(own[::2], own[1::2], strict=True))
