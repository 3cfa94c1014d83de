"""Planted faults: what the emulator says of kernels that do something wrong."""

from __future__ import annotations

import pytest
import torch

from tests import emulator
from tests.emulator import EmulatorError
from tests.emulator.handwritten import launch

pytestmark = emulator.ONLY_HERE

SEEDS = range(5)

DEEP = """
    struct Deep {
      static u32 go(u32 n) { volatile u32 x[1000]; x[n % 1000] = n; return n ? go(n - 1) + x[5] : 0; }
    };
    p.out[0] = Deep::go(1000);
"""
FAULTS = {
    "barrier never released": ("if (warp == 0) ptx::sync_block();", "threads 0-31 at sync_block; 32-63 ended"),
    "barrier of too few": (
        "ptx::sync_some(warp + 1, 64);",
        r"deadlock: threads 0-31 at sync_some\(1\); 32-63 at sync_some\(2\)",
    ),
    "barrier of parts of warps": ("if (lane < 16) ptx::sync_some(1, 32);", r"sync_some\(1\) .* a part of warp 0"),
    "barrier with two counts": ("ptx::sync_some(1, 32 + warp * 32);", r"sync_some\(1\) for .* others wait there for"),
    "no such barrier": ("ptx::sync_some(16, 64);", r"sync_some\(16\): barriers 1 to 15"),
    "barrier of odd threads": ("ptx::sync_some(1, 40);", "whole warps"),
    "lane that ended": ("if (thread != 7) ptx::sync_warp();", "threads 0-6, 8-31 in sync_warp; 7, 32-63 ended"),
    "divergent warp": (
        "if (lane < 9) ptx::any(true); else ptx::sync_warp();",
        r"divergent warp: it comes to (any|sync_warp) while threads [-\d, ]+ wait in (any|sync_warp)",
    ),
    "shuffle from nowhere": ("ptx::shuffle(1, 32);", "shuffle with lane 32"),
    "misaligned shared load": ("ptx::load_shared<Words4>(shared + 8);", "load_shared of 16 bytes .* not aligned"),
    "misaligned shared store": ("ptx::store_shared(shared + 2, 1u);", "store_shared of 4 bytes .* not aligned"),
    "misaligned row": ("u32 x[4]; ptx::load_matrices(x, shared + 8 * lane);", "load_matrices .* not aligned"),
    "beyond shared memory": ("ptx::store_shared(shared + 4096, 1u);", "store_shared .* at byte 4096 of .* 4096 bytes"),
    "before shared memory": ("ptx::load_shared<u32>(shared - 4);", "load_shared of 4 bytes at byte -4 of"),
    "address 0": ("ptx::load_shared<u32>(0);", "load_shared of 4 bytes at byte -"),
    "rows beyond": ("u32 x[4]; ptx::load_matrices_transposed(x, shared + 4096);", "_transposed of 16 .* 4096 of"),
    "plain store beyond": ("memory.at[4096 + thread - 63] = 1;", "a plain store of 1 bytes at byte 4096 of"),
    "not shared": ("int x = 0; p.out[0] = ptx::shared_address(&x);", "not in shared memory"),
    "misaligned global load": ("ptx::load_global<8>(p.x + 1);", "load_global of 8 bytes at .* not aligned"),
    "misaligned plain load": ("p.out[0] = *(u32*)((char*)p.x + p.x[0] % 1 + 2);", "load of 4 .* not aligned"),
    "global load beyond": ("ptx::load_global<16>(p.x + 64);", "load_global of 16 .* 16 bytes beyond the end of x"),
    "global store before": ("ptx::store_global<4>(p.out - 1, {});", "store_global of 4 .* 4 bytes before out"),
    "global sum beyond": ("ptx::add_global((float*)p.out + 64, 1.0f);", "add_global of 4 .* beyond the end of out"),
    "plain load beyond": ("p.out[thread] = p.x[thread + 1];", "a plain load of 4 .* 4 bytes beyond the end of x"),
    "store to an input": ("ptx::store_global<4>(p.x, {});", "store_global writes to x, which is an input"),
    "plain store to an input": ("p.x[thread] = 1;", "a plain store writes to x, which is an input"),
    "copy beyond": ("ptx::copy_async<16>(shared, p.x + 64, 16);", "copy_async of 16 .* beyond the end of x"),
    "copy to odd": ("ptx::copy_async<16>(shared + 8, p.x, 16);", "copy_async of 16 .* shared .* not aligned"),
    "copy from odd": ("ptx::copy_async<16>(shared, p.x + 1, 16);", "copy_async of 16 .* global .* not aligned"),
    "copy of too much": ("ptx::copy_async<8>(shared, p.x, 12);", "copy_async of 8 .* 12 are valid"),
    "null": ("*(volatile u32*)(0 * (i64)p.x) = 1;", "a plain store of 4 bytes at global address"),
    "stack overflow": (DEEP, "Segmentation fault"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    body, message = FAULTS[fault]
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=message):
        launch(body, warps=2, x=x, out=out, inputs="x")


def test_faults_of_the_c_librarys_fibers() -> None:
    with pytest.raises(EmulatorError, match="deadlock: threads 0-30 in sync_warp; 31 ended"):
        launch("if (lane != 31) ptx::sync_warp();", flags=("-DEMULATOR_UCONTEXT",))


def test_a_kernel_runs_again_after_a_fault() -> None:
    x, out = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    body = "if (p.x[31] == 0 && lane > 3) *(volatile u32*)(16 * (i64)p.x[31]) = 1; p.out[thread] = ptx::any(true);"
    for _ in range(3):
        with pytest.raises(EmulatorError, match="a plain store .* global address"):
            launch(body, x=torch.zeros_like(x), out=out)
        launch(body, x=x, out=out.zero_())
        assert out.eq(1).all()


def test_errors_say_where() -> None:
    with pytest.raises(EmulatorError, match=r"block 0, thread \d+: load_shared(?s:.)*at <body>:2"):
        launch("\nptx::load_shared<u32>(shared + 1);")


@pytest.mark.parametrize(
    ("barrier", "race"),
    [("ptx::sync_block();", False), ("ptx::sync_some(1, 64);", False), ("", True), ("ptx::sync_warp();", True)],
)
def test_missing_barriers_show_in_results(barrier: str, race: bool) -> None:
    body = f"""
    *(float*)&memory.at[thread * 4] = (float)thread;
    {barrier}
    p.out[thread] = *(float*)&memory.at[(thread ^ 32) * 4];
    """
    outs = torch.zeros(len(SEEDS), 64)
    for seed in SEEDS:
        launch(body, warps=2, out=outs[seed], seed=seed)
    assert outs.isnan().any() == race


MINE, YOURS = "shared + thread * 4", "shared + (thread ^ {}) * 4"
STORE, LOAD = f"ptx::store_shared({MINE}, 1u);", f"p.out[thread] = ptx::load_shared<u32>({YOURS});"
PLAIN_STORE, PLAIN_LOAD = "memory.at[2 * thread] = 1;", "p.out[thread] = memory.at[2 * (thread ^ 32)];"
COPY = "ptx::copy_async<4>({}, p.x, 4); ptx::copies_commit();"
WAIT = "ptx::copies_wait<0>();"
BLOCK, WARP = "ptx::sync_block();", "ptx::sync_warp();"
RACE, PENDING = "which thread .*, with no barrier between", "which a copy_async of thread .* is bringing"

# Body, and what is said of the race, if there is one.
RACES = {
    "other warp, no barrier": (STORE + LOAD.format(32), RACE),
    "other warp, sync_warp": (STORE + WARP + LOAD.format(32), RACE),
    "other warp, sync_block": (STORE + BLOCK + LOAD.format(32), ""),
    "other warp, barriers of one warp": (STORE + "ptx::sync_some(1 + warp, 32);" + LOAD.format(32), RACE),
    "other warp, common barrier": (STORE + "ptx::sync_some(1, 64);" + LOAD.format(32), ""),
    "other lane, nothing": (STORE + LOAD.format(1), RACE),
    "other lane, a shuffle": (STORE + "ptx::any(true);" + LOAD.format(1), RACE),
    "other lane, sync_warp": (STORE + WARP + LOAD.format(1), ""),
    "other lane, sync_block": (STORE + BLOCK + LOAD.format(1), ""),
    "write after read": (STORE + BLOCK + LOAD.format(32) + STORE, RACE),
    "write after read, other lane": (STORE + BLOCK + LOAD.format(1) + STORE, RACE),
    "write after read, sync_block": (STORE + BLOCK + LOAD.format(32) + BLOCK + STORE, ""),
    "two writes": (f"ptx::store_shared({YOURS.format(32)}, 1u);" + STORE, RACE),
    "one after the other": ("if (warp == 0) " + STORE + BLOCK + "if (warp == 1) " + LOAD.format(32), ""),
    "through a third warp's barrier": (
        "if (warp == 0) { STORE ptx::sync_some(1, 64); } else { ptx::sync_some(1, 64); LOAD }"
        .replace("STORE", STORE).replace("LOAD", LOAD.format(32)), "",
    ),
    "rows of another warp": (STORE + "u32 x[4]; ptx::load_matrices(x, shared + lane * 16 % 256);", RACE),
    "rows after sync_block": (STORE + BLOCK + "u32 x[4]; ptx::load_matrices(x, shared + lane * 16 % 256);", ""),
    "plain accesses": (PLAIN_STORE + PLAIN_LOAD, RACE),
    "plain accesses, sync_block": (PLAIN_STORE + BLOCK + PLAIN_LOAD, ""),
    "copy not waited for": (COPY.format(MINE) + LOAD.format(0), PENDING),
    "copy not waited for by its thread": (COPY.format(MINE) + BLOCK + WAIT + LOAD.format(1), PENDING + "|" + RACE),
    "copy not committed": (f"ptx::copy_async<4>({MINE}, p.x, 4);" + WAIT + BLOCK + LOAD.format(1), PENDING),
    "copy of the latest group": (COPY.format(MINE) + "ptx::copies_wait<1>();" + BLOCK + LOAD.format(1), PENDING),
    "copy waited for": (COPY.format(MINE) + WAIT + LOAD.format(0), ""),
    "copy for all": (COPY.format(MINE) + WAIT + BLOCK + LOAD.format(32), ""),
    "copy over what is read": (STORE + BLOCK + LOAD.format(32) + COPY.format(MINE) + WAIT, RACE),
    "copy after what is read": (STORE + BLOCK + LOAD.format(32) + BLOCK + COPY.format(MINE) + WAIT, ""),
}  # fmt: skip


@pytest.mark.parametrize("race", RACES)
def test_races(race: str) -> None:
    body, message = RACES[race]
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for seed in SEEDS:
        if message:
            with pytest.raises(EmulatorError, match=f"race: .*({message})"):
                launch(body, warps=2, x=x, out=out, inputs="x", seed=seed, race_check=True)
        else:
            launch(body, warps=2, x=x, out=out, inputs="x", seed=seed, race_check=True)
