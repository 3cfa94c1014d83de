"""What the emulator does of Hopper: mbarriers, copies of boxes and products of warpgroups, each against its definition.
For faulty kernels see tests/emulator/test_hopper_faults.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jitattn import source, wgmma
from tests import emulator
from tests.emulator.handwritten import launch
from tests.test_emulator import signatures

pytestmark = emulator.ONLY_HERE

SEEDS = range(5)
BF16, F16 = torch.bfloat16, torch.float16
ELEMENT = {BF16: "bf16", F16: "f16"}

# ------------------------------------------------------------------------------------------------ the contract

CUDA, MINE = source.kernel_src() / "arch" / "sm90", Path(emulator.__file__).parent / "device"


@pytest.mark.parametrize("name", ["cluster.h", "mbarrier.h", "tma.h", "turns.h", "wgmma.h"])
def test_functions_are_those_of_cuda(name: str) -> None:
    cuda, mine = signatures((CUDA / name).read_text()), signatures((MINE / name).read_text())
    # Made for each shape and element on a GPU, templates here.
    products = {each for each in mine if " wgmma(" in each}
    assert len(cuda) > 1 and len(products) == (2 if name == "wgmma.h" else 0)
    assert cuda - mine == set(), "the emulator lacks these"
    assert mine - cuda == products, "only the emulator has these"


def test_products_are_called_alike() -> None:
    generated = signatures("\n".join(["namespace ptx {", *wgmma.functions("bf16", [16])]))
    mine = {each for each in signatures((MINE / "wgmma.h").read_text()) if " wgmma(" in each}
    assert {
        each.replace(", class E, i32 sums>", ">").replace("(E,", "(bf16,").replace("[sums]", "[8]") for each in mine
    } == generated


def test_descriptors_are_the_same() -> None:
    cuda, mine = ((folder / "wgmma.h").read_text().partition("FN u64 swizzled")[2].split() for folder in (CUDA, MINE))
    assert cuda and cuda == mine


# ------------------------------------------------------------------------------------------------ products

DEPTH = 48

# One warpgroup multiplies a (64 x DEPTH) by b (DEPTH x N).
PRODUCT = """
    const u32 a_bytes = {a_rows} * 128, b_bytes = {b_rows} * 128, b_boxes = {b_boxes};
    const u32 full = shared + a_bytes + b_boxes * b_bytes, a = shared, b = shared + a_bytes;
    if (thread == 0) {{
      ptx::mbarrier_init(full, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(full, a_bytes + b_boxes * b_bytes);
      ptx::tma_load(a, p.a_map, full, 0, 0, 0, 0);
      for (u32 i = 0; i < b_boxes; ++i) ptx::tma_load(b + i * b_bytes, p.b_map, full, i * 64, 0, 0, 0);
    }}
    ptx::sync_block();
    ptx::mbarrier_wait_parity(full, 0);
    float d[{n} / 2];
    u32 words[{depth} / 16][4];
    const u32 row = warp * 16 + lane / 4, column = lane % 4 * 2;
    for (u32 step = 0; step < {depth} / 16; ++step)
      for (u32 i = 0; i < 4; ++i)
        words[step][i] = *(u32*)&p.words[(row + i % 2 * 8) * {depth} + step * 16 + column + i / 2 * 8];
    const u64 a_desc = ptx::swizzled(a), b_desc = ptx::swizzled(b, b_bytes);
    ptx::wgmma_fence();
    {steps}
    ptx::wgmma_commit();
    const bool hidden = d[0] != d[0] && d[{n} / 2 - 1] != d[{n} / 2 - 1];
    ptx::wgmma_wait<0>();
    ptx::registers_change(d);
    for (u32 i = 0; i < {n} / 2; ++i)
      p.out[(row + i / 2 % 2 * 8) * {n} + i / 4 * 8 + column + i % 2] = hidden ? d[i] : -1;
"""


def product(a: Tensor, b: Tensor, *, a_from: str, b_by_rows: bool, seed: int = 0, race_check: bool = True) -> Tensor:
    """a b, `a` coming from "registers", "rows" (contracted along them) or "columns" of shared memory."""
    n, dtype = b.shape[1], a.dtype
    given_a, given_b = a.mT.contiguous() if a_from == "columns" else a, b if b_by_rows else b.mT.contiguous()
    steps = []
    for step in range(DEPTH // 16):
        choices = [step > 0, b_by_rows] + [True] * (a_from == "columns")
        along = {False: f"{step * 32 // 16}", True: f"{step * 2048 // 16}"}
        left = f"words[{step}]" if a_from == "registers" else f"a_desc + {along[a_from == 'columns']}"
        steps.append(
            f"ptx::wgmma<{', '.join(str(x).lower() for x in choices)}>({ELEMENT[dtype]}{{}}, d, {left}, "
            f"b_desc + {along[b_by_rows]});"
        )
    rows = {"a_rows": given_a.shape[0], "b_rows": given_b.shape[0]}
    boxes = -(-given_b.shape[1] // 64)
    out = torch.full((64, n), math.nan)
    launch(
        PRODUCT.format(n=n, depth=DEPTH, b_boxes=boxes, steps="\n    ".join(steps), **rows), warps=4,
        shared_bytes=128 * (rows["a_rows"] + boxes * rows["b_rows"]) + 8, inputs="a b words",
        boxes={"a": rows["a_rows"], "b": rows["b_rows"]}, seed=seed, race_check=race_check,
        a=given_a, b=given_b, words=a, out=out,
    )  # fmt: skip
    return out


FORMS = [
    (n, a_from, b_by_rows)
    for n in (8, 64, 80, 176, 256)
    for a_from in ("rows", "columns", "registers")
    for b_by_rows in (False, True)
    if n in (80, 176) or (a_from, b_by_rows) in (("rows", False), ("registers", True))
]


@pytest.mark.parametrize(("n", "a_from", "b_by_rows"), FORMS)
def test_products(n: int, a_from: str, b_by_rows: bool) -> None:
    dtype = F16 if n == 176 else BF16
    a, b = torch.randn(64, DEPTH).to(dtype), torch.randn(DEPTH, n).to(dtype)
    got = product(a, b, a_from=a_from, b_by_rows=b_by_rows, seed=n)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((got - exact).abs() <= DEPTH // 8 * 2.0**-23 * size).all()
    assert (got - exact).abs().max() > 0, "sums are cut to float32"


@pytest.mark.parametrize("seed", SEEDS)
def test_products_in_every_order(seed: int) -> None:
    a, b = torch.randn(64, DEPTH).to(BF16), torch.randn(DEPTH, 64).to(BF16)
    first = product(a, b, a_from="rows", b_by_rows=True)
    assert torch.equal(first, product(a, b, a_from="rows", b_by_rows=True, seed=seed, race_check=seed % 2 == 0))


def test_groups_are_waited_for_in_order() -> None:
    """The same sums in both groups stay hidden until the second is over; others need not."""
    out = torch.zeros(4, 128)
    body = """
    for (u32 i = thread; i < 64 * 64; i += 128) ptx::store_shared(shared + i * 2, (u16)0x3f80);
    ptx::fence_proxy_async();
    ptx::sync_block();
    float x[4], y[4];
    const u64 ones = ptx::swizzled(shared);
    ptx::wgmma_fence();
    ptx::wgmma<false, false>(bf16{}, x, ones, ones);
    ptx::wgmma<false, false>(bf16{}, y, ones, ones);
    ptx::wgmma_commit();
    ptx::wgmma<true, false>(bf16{}, y, ones, ones);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    p.out[thread] = x[0], p.out[128 + thread] = y[0];
    ptx::wgmma_wait<0>();
    p.out[256 + thread] = x[3], p.out[384 + thread] = y[3];
    """
    launch(body, warps=4, shared_bytes=8192, out=out, race_check=True)
    assert out[0].eq(16).all() and out[1].isnan().all() and out[2].eq(16).all() and out[3].eq(32).all()


# ------------------------------------------------------------------------------------------------ boxes


def test_boxes_end_with_the_tensor() -> None:
    """Loads give zeros outside of it, stores write nothing there."""
    x, y = torch.randn(2, 3, 50, 72).to(BF16), torch.full((2, 3, 50, 72), 7.0).to(BF16)
    places = [(0, 0, 0, 0), (64, 32, 2, 1), (-8, -4, 1, 0), (0, 50, 0, 0), (0, 0, 3, 0), (0, 0, 0, -1)]
    seen = torch.zeros(len(places), 32, 64, dtype=BF16)
    at = "const i32 at[][4] = {" + ", ".join("{%d, %d, %d, %d}" % place for place in places) + "};"  # noqa: UP031
    body = f"""
    {at}
    const u32 full = shared + 4096;
    if (thread == 0) ptx::mbarrier_init(full, 1), ptx::fence_mbarrier_init();
    ptx::sync_block();
    for (u32 i = 0; i < {len(places)}; ++i) {{
      if (thread == 0) {{
        ptx::prefetch_tensormap(p.x_map);
        ptx::mbarrier_arrive_expect_tx(full, 4096);
        ptx::tma_load(shared, p.x_map, full, at[i][0], at[i][1], at[i][2], at[i][3]);
      }}
      ptx::mbarrier_wait_parity(full, i % 2);
      for (u32 j = 0; j < 8; ++j)
        ptx::store_global<16>(p.seen + (i * 32 + lane) * 64 + j * 8,
                              ptx::load_shared<Words4>(shared + lane * 128 + (j ^ lane % 8) * 16));
      ptx::sync_warp();
      if (thread == 0) {{
        ptx::tma_store(p.y_map, shared, at[i][0], at[i][1], at[i][2], at[i][3]);
        ptx::tma_stores_commit();
        ptx::tma_stores_wait<0>();
      }}
      ptx::sync_warp();
    }}
    """
    launch(body, shared_bytes=4096 + 8, x=x, y=y, seen=seen, inputs="x", boxes={"x": 32, "y": 32}, race_check=True)
    wide = torch.zeros(4, 6, 150, 300, dtype=BF16)
    wide[1:3, 1:4, 50:100, 100:172] = x
    stored = torch.zeros(2, 3, 50, 72, dtype=torch.bool)
    wide_stored = torch.zeros(4, 6, 150, 300, dtype=torch.bool)
    for i, (column, row, z, w) in enumerate(places):
        box = (w + 1, z + 1, slice(row + 50, row + 82), slice(column + 100, column + 164))
        assert torch.equal(seen[i], wide[box])
        wide_stored[box] = True
    stored = wide_stored[1:3, 1:4, 50:100, 100:172]
    assert torch.equal(y, torch.where(stored, x, 7.0).to(BF16))


def test_loads_of_bytes() -> None:
    x, out = torch.randint(0, 256, (1040,), dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    body = """
    const u32 full = shared + 2048;
    if (thread == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(full, 1024);
      ptx::bulk_load(shared + 32, p.x + 16, 1008, full);
      ptx::bulk_load(shared + 16, p.x, 16, full);
    }
    ptx::sync_warp();
    ptx::mbarrier_wait_parity(full, 0);
    for (u32 i = lane; i < 64; i += 32)
      ptx::store_global<16>(p.out + 16 * i, ptx::load_shared<Words4>(shared + 16 + 16 * i));
    """
    launch(body, x=x, out=out, inputs="x", race_check=True)
    assert torch.equal(out, x[:1024])


# ------------------------------------------------------------------------------------------------ order

# A warp brings tiles of a and b to a ring of stages, a warpgroup multiplies them and has the result stored.
RING = """
    constexpr u32 stages = 2, tile = 64 * 128, turns = 2 * stages * tile;
    const auto full = [&](u32 i) {{ return shared + turns + i % stages * 16; }};
    const auto free = [&](u32 i) {{ return shared + turns + i % stages * 16 + 8; }};
    if (thread == 0) {{
      for (u32 i = 0; i < stages; ++i) ptx::mbarrier_init(full(i), 1), ptx::mbarrier_init(free(i), {users});
      ptx::fence_mbarrier_init();
    }}
    ptx::sync_block();
    constexpr u32 tiles = 7;
    if (warp >= 4) {{
      ptx::setmaxnreg_dec<24>();
      if (thread == 128)
        for (u32 i = 0; i < tiles; ++i) {{
          ptx::mbarrier_wait_parity(free(i), (i / stages + 1) % 2);
          ptx::mbarrier_arrive_expect_tx(full(i), 2 * tile);
          ptx::tma_load(shared + i % stages * 2 * tile, p.a_map, full(i), i * 64, block * 64, 0, 0);
          ptx::tma_load(shared + i % stages * 2 * tile + tile, p.b_map, full(i), 0, i * 64, 0, 0);
        }}
      return;
    }}
    ptx::setmaxnreg_inc<240>();
    float d[32];
    for (u32 i = 0; i < 32; ++i) d[i] = 0;
    for (u32 i = 0; i < tiles; ++i) {{
      ptx::mbarrier_wait_parity(full(i), i / stages % 2);
      const u32 at = shared + i % stages * 2 * tile;
      const u64 a = ptx::swizzled(at), b = ptx::swizzled(at + tile);
      ptx::wgmma_fence();
      for (u32 k = 0; k < 4; ++k) ptx::wgmma<true, true>(bf16{{}}, d, a + k * 2, b + k * 128);
      ptx::wgmma_commit();
      {release}
    }}
    ptx::wgmma_wait<0>();
    const u32 row = warp * 16 + lane / 4, column = lane % 4 * 2;
    ptx::sync_some(1, 128);
    for (u32 i = 0; i < 32; i += 2) {{
      const u32 at = (row + i / 2 % 2 * 8) * 128 + (i / 4 * 8 + column) * 2;
      ptx::store_shared(shared + (at ^ (at >> 7 & 7) << 4), ptx::pack_bf16(d[i], d[i + 1]));
    }}
    ptx::fence_proxy_async();
    ptx::sync_some(1, 128);
    if (thread == 0) {{
      ptx::tma_store(p.out_map, shared, 0, block * 64, 0, 0);
      ptx::tma_stores_commit();
      ptx::tma_stores_wait<0>();
    }}
"""
RELEASES = {
    "every thread": (128, "ptx::wgmma_wait<0>(); ptx::mbarrier_arrive(free(i));"),
    "a lane of each warp": (4, "ptx::wgmma_wait<0>(); if (lane == 0) ptx::mbarrier_arrive(free(i));"),
    "one for all": (1, "ptx::wgmma_wait<0>(); if (thread == 96) ptx::mbarrier_arrive(free(i));"),
    "the tile before": (4, "ptx::wgmma_wait<1>(); if (lane == 0 && i) ptx::mbarrier_arrive(free(i - 1));"),
}


def ring(release: str, *, users: int = 4, seed: int = 0, race_check: bool = True) -> None:
    a, b = torch.randn(100, 420).to(BF16), torch.randn(420, 64).to(BF16)
    a = torch.nn.functional.pad(a, (0, 4))[:, :420]  # rows are 16 bytes times something
    out = torch.full((100, 64), math.nan, dtype=BF16)
    launch(
        RING.format(users=users, release=release), warps=8, blocks=2, shared_bytes=4 * 8192 + 32, inputs="a b", a=a,
        b=b, out=out, boxes={"a": 64, "b": 64, "out": 64}, seed=seed, race_check=race_check,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("release", RELEASES)
def test_a_ring_of_stages(release: str) -> None:
    users, words = RELEASES[release]
    for seed in SEEDS:
        ring(words, users=users, seed=seed, race_check=seed % 2 == 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_to_pass_by(seed: int) -> None:
    """Warps take turns with a value in shared memory."""
    out = torch.zeros(1, dtype=torch.int32)
    body = """
    if (warp == 2 && lane == 0) ptx::store_shared(shared, 0u);
    if (warp == 2) ptx::arrive_some(1, 64);
    for (u32 i = 0; i < 10; ++i) {
      ptx::sync_some(1 + warp, 64);
      if (lane == 0) ptx::store_shared(shared, ptx::load_shared<u32>(shared) * 3 + warp);
      if (warp < 2 || i < 9) ptx::arrive_some(1 + (warp + 1) % 3, 64);
    }
    if (warp == 2 && lane == 0) p.out[0] = ptx::load_shared<u32>(shared) + ptx::block_count();
    """
    launch(body, warps=3, out=out, seed=seed, race_check=True)
    x = 0
    for i in range(30):
        x = (x * 3 + i % 3) % 2**32
    assert out.item() % 2**32 == x + 1
