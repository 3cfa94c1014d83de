"""The CUDA emulator: every instruction against its definition. For faulty kernels see tests/emulator/test_faults.py."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jitattn import source
from tests import emulator
from tests.emulator.handwritten import launch

pytestmark = emulator.ONLY_HERE

SEEDS = range(5)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, except that any NaN is as good as another."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(*(x.nan_to_num(0.0, math.inf, -math.inf) for x in (a, b)))


# ------------------------------------------------------------------------------------------------ the contract


def signatures(text: str) -> set[str]:
    """The functions of namespace ptx: their names with the types of results and parameters."""
    text = re.sub(r"//.*", "", text).partition("namespace ptx {")[2]
    found = re.findall(r"(template <[^>]*>\s*)?FN ([\w:]+) (\w+(?:<\w+>)?)\(((?:[^()]|\([^()]*\))*)\)\s*[{;]", text)
    return {
        f"{' '.join(template.split())} {result} {name}({', '.join(map(unnamed, parameters.split(', ')))})"
        for template, result, name, parameters in found
    }


def unnamed(parameter: str) -> str:
    """ "const u32 (&a)[4]" -> "const u32 (&)[4]"."""
    return re.sub(r"(?<=[ &*])\w+(?=\)|$)", "", parameter).strip()


def test_functions_are_those_of_cuda() -> None:
    cuda = signatures((source.kernel_src() / "arch" / "cuda" / "ptx.h").read_text())
    mine = signatures((Path(emulator.__file__).parent / "device" / "ptx.h").read_text())
    assert len(cuda) > 30 and " float exp2(float)" in cuda
    assert cuda - mine == set(), "the emulator lacks these"
    assert mine - cuda == set(), "only the emulator has these"


# ------------------------------------------------------------------------------------------------ arithmetic


def test_number_formats() -> None:
    special = [
        0x3F800FFF,
        0x3F801000,
        0x3F802FFF,
        0x477FEFFF,
        0x477FF000,
        0x33000000,
        0x33000001,
        0x387FE000,
        0x387FF001,
    ]
    special += [
        bits | sign for bits in (0, 1, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x007FFFFF) for sign in (0, -(2**31))
    ]
    x = torch.cat([torch.tensor(special, dtype=torch.int64).to(torch.int32), words(1 << 14)])
    small = torch.randn(1 << 14).mul(1e-6).view(torch.int32)  # where float16 is subnormal
    x = torch.cat([x, small, torch.randn(1 << 14).mul(1e4).view(torch.int32)])[: 1 << 15]
    half = torch.arange(1 << 16, dtype=torch.int32)
    bf16, f16 = (torch.zeros(len(x), dtype=torch.int32) for _ in range(2))
    wide = torch.zeros(1 << 16)
    body = """
    for (u32 i = thread; i < 1 << 15; i += 32) {
      p.bf16[i] = ptx::pack_bf16(ptx::real(p.x[i]), -ptx::real(p.x[i]));
      p.f16[i] = ptx::pack_f16(ptx::real(p.x[i]), -ptx::real(p.x[i]));
    }
    for (u32 i = thread; i < 1 << 16; i += 32) p.wide[i] = ptx::float_of_f16((u16)p.half[i]);
    """
    launch(body, x=x, half=half, bf16=bf16, f16=f16, wide=wide, inputs="x half")
    assert same_bits(wide, half.to(torch.int16).view(torch.float16).float())
    pairs = torch.stack([x.view(torch.float32), -x.view(torch.float32)], -1)
    assert same_bits(bf16.view(torch.bfloat16).view(-1, 2), pairs.to(torch.bfloat16))
    assert same_bits(f16.view(torch.float16).view(-1, 2), pairs.to(torch.float16))


def test_exp2_and_log2_flush_subnormal_numbers() -> None:
    x = torch.tensor([0.0, 1.0, -3.5, -127.5, 2.0**-130, -math.inf, math.inf, math.nan, 100.3])
    up, down = torch.zeros_like(x), torch.zeros_like(x)
    body = "if (thread < 9) p.up[thread] = ptx::exp2(p.x[thread]), p.down[thread] = ptx::log2(p.x[thread]);"
    launch(body, x=x, up=up, down=down, inputs="x")
    torch.testing.assert_close(up[:3], torch.exp2(x[:3]))
    assert up[3:].nan_to_num(-1.0, math.inf).tolist()[:5] == [0.0, 1.0, 0.0, math.inf, -1.0]
    torch.testing.assert_close(down[[1, 8]], torch.log2(x[[1, 8]]))
    assert down[[0, 4, 6]].tolist() == [-math.inf, -math.inf, math.inf] and down[[2, 5, 7]].isnan().all()


# ------------------------------------------------------------------------------------------------ products


def operand_a(words: Tensor, dtype: torch.dtype) -> Tensor:
    """(32, 4) words of a product's left side -> its matrix, 16 rows of 32 bytes."""
    per = words.view(dtype).view(8, 4, 4, -1)  # g, t, word, element
    halves = per.unflatten(2, (2, 2))  # g, t, which half of the columns, which half of the rows, element
    return halves.permute(3, 0, 2, 1, 4).reshape(16, -1).double()


def operand_b(words: Tensor, dtype: torch.dtype) -> Tensor:
    """(32, 2) words of the right side -> its matrix, 8 columns."""
    per = words.view(dtype).view(8, 4, 2, -1)  # g, t, which half of the rows, element
    return per.permute(2, 1, 3, 0).reshape(-1, 8).double()


def sums(words: Tensor) -> Tensor:
    """(32, 4) sums -> 16 x 8."""
    return words.view(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8).double()


def as_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).view(torch.int32)


PRODUCT = """
    float c[4];
    u32 a[4], b[2];
    for (u32 i = 0; i < 4; ++i) a[i] = p.a[thread * 4 + i], c[i] = p.c[thread * 4 + i];
    for (u32 i = 0; i < 2; ++i) b[i] = p.b[thread * 2 + i];
    CALL;
    for (u32 i = 0; i < 4; ++i) p.c[thread * 4 + i] = c[i];
"""
PRODUCTS = {
    "mma_bf16(c, a, b)": torch.bfloat16,
    "mma_f16(c, a, b)": torch.float16,
    "mma_f16_k8(c, a[0], a[1], b[0])": torch.float16,
}


def product(call: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    c = c.clone()
    launch(PRODUCT.replace("CALL", f"ptx::{call}"), a=a, b=b, c=c, inputs="a b")
    return c


@pytest.mark.parametrize("call", PRODUCTS)
def test_products(call: str) -> None:
    dtype = PRODUCTS[call]
    elements = 4 // dtype.itemsize
    a, b = as_words(torch.randn(32, 4 * elements), dtype), as_words(torch.randn(32, 2 * elements), dtype)
    c = torch.randn(32, 4)
    got = sums(product(call, a, b, c))
    x, y = operand_a(a, dtype), operand_b(b, dtype)
    if "k8" in call:
        x, y = x[:, :8], y[:8]
    exact = sums(c) + x @ y
    assert ((got - exact).abs() <= 4 * 2.0**-23 * (sums(c).abs() + x.abs() @ y.abs())).all()
    assert (got - exact).abs().max() > 0, "sums are cut to float32"


@pytest.mark.parametrize("call", PRODUCTS)
def test_sums_of_products_are_cut_off(call: str) -> None:
    """1 + 3/4 of the last bit's unit stays 1."""
    dtype = PRODUCTS[call]
    elements = 4 // dtype.itemsize
    a, b = torch.zeros(32, 4 * elements), torch.zeros(32, 2 * elements)
    a[::4, 0], b[::4, 0] = 2.0**-12, 0.75 * 2.0**-11  # one term of every sum
    found = product(call, as_words(a, dtype), as_words(b, dtype), torch.ones(32, 4))
    assert found.eq(1.0).all()


# ------------------------------------------------------------------------------------------------ warps and order


def test_lanes_trade() -> None:
    x = words(32)
    out = torch.zeros(4, 32, dtype=torch.int32)
    body = """
    p.out[lane] = ptx::bits(ptx::shuffle_xor(ptx::real(p.x[lane]), 5));
    p.out[32 + lane] = ptx::shuffle(p.x[lane], (lane * 7 + 3) % 32);
    p.out[64 + lane] = ptx::any(lane == 17);
    p.out[96 + lane] = ptx::any(lane == 32);
    """
    launch(body, x=x, out=out, inputs="x")
    lanes = torch.arange(32)
    assert torch.equal(out[0], x[lanes ^ 5]) and torch.equal(out[1], x[(lanes * 7 + 3) % 32])
    assert out[2].eq(1).all() and out[3].eq(0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_barriers_of_some_warps(seed: int) -> None:
    """Warps 0 and 1 hand a value to each other again and again, warps 2 and 3 likewise at a barrier of their own."""
    out = torch.zeros(128, dtype=torch.int32)
    body = """
    u32 x = warp;
    for (u32 i = 0; i < 10; ++i) {
      ptx::store_shared(shared + thread * 4, x + 1);
      ptx::sync_some(1 + warp / 2, 64);
      x = ptx::load_shared<u32>(shared + (thread ^ 32) * 4);
      ptx::sync_some(3 + warp / 2, 64);
    }
    ptx::sync_block();
    p.out[thread] = x;
    """
    launch(body, warps=4, out=out, seed=seed, race_check=True)
    assert torch.equal(out.view(4, 32), torch.tensor([0, 1, 2, 3])[:, None].expand(4, 32) + 10)


def test_seeds_give_orders() -> None:
    def order(seed: int) -> list[int]:
        out, count = torch.zeros(512, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        body = "for (u32 i = 0; i < 2; ++i) { p.out[p.count[0]++] = block * 64 + thread; ptx::sync_block(); }"
        launch(body, warps=2, blocks=4, out=out, count=count, seed=seed)
        assert sorted(out.tolist()) == sorted(2 * list(range(256)))
        return out.tolist()

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_fibers_of_the_c_library(seed: int) -> None:
    """Those of processors that engine/fiber.h has no instructions for."""
    out = torch.zeros(64, dtype=torch.int32)
    body = "for (u32 i = 0; i < 20; ++i) { ptx::sync_block(); p.out[thread] += ptx::shuffle(lane, 31 - lane); }"
    launch(body, warps=2, out=out, seed=seed, flags=("-DEMULATOR_UCONTEXT",))
    assert torch.equal(out.view(2, 32), 20 * torch.arange(31, -1, -1).expand(2, 32))


# ------------------------------------------------------------------------------------------------ memory


def test_loads_and_stores() -> None:
    x = torch.randint(0, 256, (32 * 16,), dtype=torch.uint8)
    out, total = torch.zeros(4, 32 * 16, dtype=torch.uint8), torch.zeros(32 * 4)
    body = """
    const char* from = p.x + thread * 16;
    const Words4 all = ptx::load_global<16>(from);
    ptx::store_shared(shared + thread * 16, all);
    ptx::store_global<16>(p.out + thread * 16, ptx::load_shared<Words4>(shared + thread * 16));
    for (u32 i = 0; i < 16; i += 8) {
      const Words4 half = ptx::load_global<8>(from + i);
      ptx::store_shared(shared + thread * 16 + i, Words2{half.word[0], half.word[1]});
      ptx::store_global<8>(p.out + 512 + thread * 16 + i, half);
    }
    for (u32 i = 0; i < 16; i += 4) {
      ptx::store_shared(shared + thread * 16 + i, ptx::load_global<4>(from + i).word[0]);
      ptx::store_global<4>(p.out + 1024 + thread * 16 + i, {{ptx::load_shared<u32>(shared + thread * 16 + i)}});
    }
    for (u32 i = 0; i < 16; i += 2) {
      ptx::store_shared(shared + thread * 16 + i, (u16)ptx::load_global<2>(from + i).word[0]);
      ptx::store_global<2>(p.out + 1536 + thread * 16 + i, {{ptx::load_shared<u16>(shared + thread * 16 + i)}});
    }
    float* sum = p.total + thread * 4;
    ptx::add_global(sum, 1.0f);
    ptx::add_global(sum, 2.0f, 3.0f);
    ptx::add_global(sum, 10.0f, 20.0f, 30.0f, (float)thread);
    """
    launch(body, x=x, out=out, total=total, inputs="x", race_check=True)
    assert all(torch.equal(copy, x) for copy in out)
    expected = torch.tensor([13.0, 23.0, 30.0, 0.0]).repeat(32, 1)
    expected[:, 3] = torch.arange(32.0)
    assert torch.equal(total.view(32, 4), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads(transposed: bool) -> None:
    x = torch.randint(-(2**15), 2**15, (64, 8)).to(torch.int16)
    rows = torch.randperm(64)[:32].to(torch.int32)
    out = torch.zeros(32, 4, dtype=torch.int32)
    body = f"""
    for (u32 i = thread; i < 512; i += 32) ptx::store_shared(shared + i * 2, p.x[i]);
    ptx::sync_warp();
    u32 words[4];
    ptx::load_matrices{"_transposed" * transposed}(words, shared + p.rows[lane] * 16);
    for (u32 i = 0; i < 4; ++i) p.out[lane * 4 + i] = words[i];
    """
    launch(body, x=x, rows=rows, out=out, inputs="x rows", race_check=True)
    matrices = x[rows.long()].view(4, 8, 8)
    matrices = matrices.mT if transposed else matrices
    got = out.view(torch.int16).view(32, 4, 2).transpose(0, 1).reshape(4, 8, 8)  # matrix, row, pairs of columns
    assert torch.equal(got, matrices)


def test_copies_come_late_and_fill_with_zeros() -> None:
    x = torch.randint(1, 256, (64, 16), dtype=torch.uint8)
    early, late, last = (torch.zeros(64, 4, dtype=torch.int32) for _ in range(3))
    body = """
    const u32 to = shared + thread * 16, size = 4u << thread % 3, valid = p.x[0] * 0 + thread % 5 * 4;
    const char* from = p.x + thread * 16;
    const auto see = [&](u32* into) {
      for (u32 i = 0; i < 4; ++i) into[thread * 4 + i] = ptx::load_shared<u32>(to + 4 * i);
    };
    for (u32 i = 0; i < 16; i += size) {
      const u32 left = valid > i ? valid - i : 0, some = left < size ? left : size;
      if (size == 4) ptx::copy_async<4>(to + i, from + i, some);
      if (size == 8) ptx::copy_async<8>(to + i, from + i, some);
      if (size == 16) ptx::copy_async<16>(to + i, from + i, some);
      if (i < 8 && i + size >= 8) ptx::copies_commit();
    }
    ptx::copies_commit();
    ptx::copies_wait<2>();
    see(p.early);
    ptx::copies_wait<1>();
    see(p.late);
    ptx::copies_wait<0>();
    see(p.last);
    """
    launch(body, warps=2, x=x, early=early, late=late, last=last, inputs="x")
    thread = torch.arange(64)[:, None]
    expected = x.masked_fill(torch.arange(16) >= thread % 5 * 4, 0).view(torch.int32)
    assert early.eq(-1).all(), "nothing was waited for yet"
    first_group = torch.where((torch.arange(4) < 2) | (thread % 3 == 2), expected, -1)
    assert torch.equal(late, first_group) and torch.equal(last, expected)


def test_shared_memory_begins_as_nan() -> None:
    out = torch.zeros(2, 32)
    launch("p.out[block * 32 + lane] = *(float*)&memory.at[lane * 4]; memory.at[lane * 4] = 0;", blocks=2, out=out)
    assert out.isnan().all()
