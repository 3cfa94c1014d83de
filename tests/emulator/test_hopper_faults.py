"""Planted faults: what the emulator says of kernels that use mbarriers, copies of boxes and products of warpgroups
wrongly."""

from __future__ import annotations

import re

import pytest
import torch

from tests import emulator
from tests.emulator import EmulatorError
from tests.emulator.handwritten import launch

pytestmark = emulator.ONLY_HERE

SEEDS = range(5)

# What bodies are made of.
WORDS = {
    "INIT": "if (thread == 0) ptx::mbarrier_init(BAR, 1), ptx::fence_mbarrier_init(); BLOCK",
    "LOAD": "if (thread == 0) { EXPECT FETCH }",
    "FETCH": "ptx::tma_load(shared, p.x_map, BAR, 0, 0, 0, 0);",
    "EXPECT": "ptx::mbarrier_arrive_expect_tx(BAR, 8192);",
    "WAIT": "ptx::mbarrier_wait_parity(BAR, 0);",
    "FILL": "for (u32 i = thread; i < 4096; i += 160) ptx::store_shared(shared + i * 2, (u16)0);",
    "READ": "p.out[thread] = ptx::load_shared<u16>(shared + thread * 2);",
    "WRITE": "if (thread == 140) ptx::store_shared(shared, 1u);",
    "STORE": "if (thread == 0) ptx::tma_store(p.out_map, shared, 0, 0, 0, 0), ptx::tma_stores_commit();",
    "STORED": "if (thread == 0) ptx::tma_stores_wait<0>();",
    "MULTIPLY": "float d[32]; if (warp < 4) { ptx::wgmma_fence(); PRODUCT ptx::wgmma_commit(); }",
    "PRODUCT": "ptx::wgmma<false, false>(bf16{}, d, ptx::swizzled(shared), ptx::swizzled(shared));",
    "MULTIPLIED": "if (warp < 4) ptx::wgmma_wait<0>();",
    "FREE": "if (warp < 4 && lane == 0) ptx::mbarrier_arrive(BAR + 8);",
    "FREED": "ptx::mbarrier_wait_parity(BAR + 8, 0);",
    "PROXY": "ptx::fence_proxy_async();",
    "BLOCK": "ptx::sync_block();",
    "BAR": "(shared + 32768)",
}


def written_out(body: str) -> str:
    for word, text in WORDS.items():
        body = re.sub(rf"\b{word}\b", text, body)
    return body


def run(body: str, *, seed: int = 0, race_check: bool = False) -> None:
    x, out = torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    launch(
        written_out(body), warps=5, shared_bytes=32768 + 64, inputs="x", x=x, out=out, boxes={"x": 64, "out": 64},
        seed=seed, race_check=race_check,
    )  # fmt: skip


FAULTS = {
    "nobody arrives": (
        "INIT WAIT",
        r"deadlock: threads 0-159 in mbarrier_wait_parity of the mbarrier at shared byte "
        "32768, whose phase 0 lacks 1 of 1 arrivals and 0 bytes",
    ),
    "bytes do not come": (
        "INIT if (thread == 0) ptx::mbarrier_arrive_expect_tx(BAR, 16); WAIT",
        "0 of 1 arrivals and 16 bytes",
    ),
    "the parity to come": (
        "INIT LOAD ptx::mbarrier_wait_parity(BAR, 0); ptx::mbarrier_wait_parity(BAR, 1);",
        "deadlock: .*whose phase 1 lacks 1 of 1 arrivals",
    ),
    "too many arrivals": ("INIT LOAD if (thread == 0) ptx::mbarrier_arrive(BAR);", "one arrival more than the 1 of"),
    "too many bytes": (
        "INIT if (thread == 0) ptx::mbarrier_arrive_expect_tx(BAR, 8192 - 16), "
        "ptx::tma_load(shared, p.x_map, BAR, 0, 0, 0, 0); WAIT",
        "got 16 bytes more than its phase 0 expects",
    ),
    "no mbarrier": ("ptx::mbarrier_arrive(BAR);", "mbarrier_arrive at shared byte 32768, where no mbarrier"),
    "two mbarriers": ("INIT INIT", "mbarrier_init at shared byte 32768, where one is in use"),
    "an mbarrier written over": (
        "INIT if (thread == 9) ptx::store_shared(BAR, 0u); BLOCK WAIT",
        "written over the mbarrier",
    ),
    "misaligned mbarrier": ("ptx::mbarrier_init(BAR + 4, 1);", "mbarrier_init of 8 bytes .* not aligned"),
    "no fence of an mbarrier": (
        "if (thread == 0) ptx::mbarrier_init(BAR, 1); BLOCK LOAD",
        "without a fence_mbarrier_init",
    ),
    "parity of 2": ("INIT ptx::mbarrier_wait_parity(BAR, 2);", "for parity 2"),
    "an end while loads are under way": (
        "INIT LOAD",
        "ends while a tma_load of .* is under way|nobody has waited for what",
    ),
    "half a load": (
        "INIT if (thread == 0) ptx::tma_load(shared + 512, p.x_map, BAR, 0, 0, 0, 0);",
        "not aligned to 1024",
    ),
    "no room": (
        "INIT if (thread == 0) ptx::tma_load(shared + 32768, p.x_map, BAR, 0, 0, 0, 0);",
        "byte 32768 of a shared",
    ),
    "store to an input": (
        "FILL PROXY BLOCK if (thread == 0) ptx::tma_store(p.x_map, shared, 0, 0, 0, 0);",
        "x, which is an input",
    ),
    "no map": ("TensorMap m = {}; ptx::prefetch_tensormap(m);", "something else than a tensor map"),
    "two loads to one place": (
        "INIT LOAD if (thread == 0) FETCH WAIT",
        "which a tma_load brings, and nobody has waited|got 8192 bytes more",
    ),
    "bytes from odd": (
        "INIT if (thread == 0) ptx::bulk_load(shared, p.x + 1, 16, BAR);",
        "all must be multiples of 16",
    ),
    "bytes beyond": (
        "INIT if (thread == 0) ptx::bulk_load(shared, p.x + 4088, 32, BAR);",
        "bulk_load of 32 .* beyond the end of x",
    ),
    "stored without a fence": (
        "FILL BLOCK STORE STORED",
        "tma_store reads shared byte .* wrote without a fence_proxy_async",
    ),
    "loaded over without a fence": (
        "INIT FILL BLOCK LOAD WAIT",
        "tma_load writes shared byte .* without a fence_proxy",
    ),
    "multiplied without a fence": (
        "FILL BLOCK MULTIPLY MULTIPLIED",
        "wgmma reads shared byte .* without a fence_proxy",
    ),
    "written before the fence of another": (
        "FILL BLOCK if (thread != 5) PROXY BLOCK STORE STORED",
        "which thread 5 wrote without",
    ),
    "written while stored": (
        "FILL PROXY BLOCK STORE if (thread == 0) ptx::store_shared(shared, 1u);",
        "which a tma_store reads",
    ),
    "written while multiplied": (
        "FILL PROXY BLOCK MULTIPLY BLOCK WRITE BLOCK MULTIPLIED",
        "store_shared writes shared byte 0, which a wgmma reads",
    ),
    "loaded while multiplied": (
        "INIT FILL PROXY BLOCK MULTIPLY BLOCK LOAD BLOCK MULTIPLIED WAIT",
        "tma_load writes .* which a wgmma reads",
    ),
    "not waited for": ("FILL PROXY BLOCK MULTIPLY", "warpgroup 0 has not waited for a wgmma"),
    "not committed": (
        "FILL PROXY BLOCK float d[32]; if (warp < 4) { ptx::wgmma_fence(); PRODUCT ptx::wgmma_wait<0>(); }",
        "warpgroup 0 has not waited for a wgmma",
    ),
    "changed before the wait": (
        "FILL PROXY BLOCK MULTIPLY d[3] = 0; MULTIPLIED",
        "registers of a wgmma .* were changed",
    ),
    "left side changed before the wait": (
        "FILL PROXY BLOCK float d[32]; u32 a[4] = {}; if (warp < 4) { ptx::wgmma_fence(); ptx::wgmma<false, false>("
        "bf16{}, d, a, ptx::swizzled(shared)); ptx::wgmma_commit(); a[1] = p.x[0] + lane; } MULTIPLIED",
        "registers that a wgmma under way reads were changed",
    ),
    "adding against its kind": (
        "FILL PROXY BLOCK float d[32]; if (warp < 4) ptx::wgmma<false, false>(bf16{}, d, ptx::swizzled(shared), "
        "ptx::swizzled(shared), true);",
        "adds now, but may not",
    ),
    "changed without a fence": (
        "FILL PROXY BLOCK float d[32]; if (warp < 4) { PRODUCT }",
        "without a wgmma_fence between",
    ),
    "used without a fence": (
        "FILL PROXY BLOCK MULTIPLY MULTIPLIED if (warp < 4) { PRODUCT }",
        "without a wgmma_fence between",
    ),
    "three warps": (
        "FILL PROXY BLOCK float d[32]; if (warp < 3) { ptx::wgmma_fence(); PRODUCT "
        "ptx::wgmma_commit(); ptx::wgmma_wait<0>(); }",
        "deadlock: threads 0-95 in wgmma_wait, for other warps",
    ),
    "four warps of two warpgroups": (
        "FILL PROXY BLOCK float d[32]; if (warp) { ptx::wgmma_fence(); PRODUCT }",
        "in a warpgroup of less than four warps",
    ),
    "different operands": (
        "FILL PROXY BLOCK float d[32]; if (warp < 4) { ptx::wgmma_fence(); ptx::wgmma<false, false>(bf16{}, d, "
        "ptx::swizzled(shared), ptx::swizzled(shared + warp / 2 * 1024)); }",
        "wgmma with different operands",
    ),
    "different lanes": (
        "FILL PROXY BLOCK float d[32]; if (warp < 4) { ptx::wgmma_fence(); ptx::wgmma<false, false>(bf16{}, d, "
        "ptx::swizzled(shared), ptx::swizzled(shared + lane / 31 * 1024)); }",
        "lanes come to wgmma with different",
    ),
    "rows that are no group": (
        "float d[32]; if (warp < 4) ptx::wgmma<false, false>(bf16{}, d, ptx::swizzled(shared + 128), "
        "ptx::swizzled(shared));",
        "inside of 8 rows",
    ),
    "columns without boxes": (
        "float d[64]; if (warp < 4) ptx::wgmma<false, true>(bf16{}, d, ptx::swizzled(shared), ptx::swizzled(shared));",
        "16 bytes apart",
    ),
    "registers beyond": ("ptx::setmaxnreg_inc<264>();", "to 264 registers"),
    "odd registers": ("ptx::setmaxnreg_inc<100>();", "to 100 registers"),
    "registers of one warp": (
        "if (warp == 1) ptx::setmaxnreg_inc<128>();",
        "only a part of warpgroup 0 has come to setmaxnreg_inc",
    ),
    "passing by twice": (
        "if (warp == 1) { ptx::arrive_some(1, 96); ptx::arrive_some(1, 96); }",
        r"arrive_some\(1\): warp 1 has arrived",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    body, message = FAULTS[fault]
    for seed in SEEDS[:2]:
        with pytest.raises(EmulatorError, match=message):
            run(body, seed=seed)


LOADED = "a tma_load brings, with no wait for it"
FREEING = "if (thread == 0) ptx::mbarrier_init(BAR + 8, 4), ptx::fence_mbarrier_init();"

# Body, and what is said of the race, if there is one.
RACES = {
    "load waited for": ("INIT LOAD WAIT READ", ""),
    "load not waited for": ("INIT LOAD BLOCK READ WAIT", LOADED),
    "load waited for by another lane": ("INIT LOAD if (lane == 0) WAIT READ", LOADED + "|which thread .* read"),
    "load waited for by a lane, sync_warp": ("INIT LOAD if (lane == 0) WAIT ptx::sync_warp(); READ", ""),
    "load waited for by a thread, sync_block": ("INIT LOAD if (thread == 99) WAIT BLOCK READ", ""),
    "load over what is read": ("FILL PROXY INIT READ LOAD WAIT", "tma_load writes .* which thread"),
    "load after what is read": ("FILL PROXY INIT READ BLOCK LOAD WAIT", ""),
    "load after an mbarrier": (
        FREEING + "FILL PROXY INIT if (warp < 4) { READ ptx::sync_warp(); } FREE if (thread == 0) { FREED } LOAD WAIT",
        "",
    ),
    "load after an mbarrier of one lane": (
        FREEING + "FILL PROXY INIT if (warp < 4) { READ } FREE if (thread == 0) { FREED } LOAD WAIT",
        "tma_load writes .* which thread",
    ),
    "mbarrier not seen": (
        "if (warp == 1 && lane == 0) ptx::mbarrier_init(BAR, 1); ptx::sync_some(1 + warp, 32); "
        "if (thread == 0) ptx::mbarrier_arrive(BAR);",
        "mbarrier_arrive reads .* which thread 32 wrote|no mbarrier was init",
    ),
    "product after the load": ("INIT LOAD WAIT MULTIPLY MULTIPLIED", ""),
    "product, a warp not waiting for the load": (
        "INIT LOAD if (warp != 2) WAIT MULTIPLY MULTIPLIED WAIT",
        LOADED + "|which a tma_load is bringing",
    ),
    "written after the product": (FREEING + "INIT LOAD WAIT MULTIPLY MULTIPLIED FREE FREED WRITE", ""),
    "written after a barrier after the product": ("INIT LOAD WAIT MULTIPLY MULTIPLIED BLOCK WRITE", ""),
    "written with no wait for the product": (
        "INIT LOAD WAIT MULTIPLY MULTIPLIED WRITE",
        "which a wgmma reads|without a fence|which thread 140 wrote",
    ),
    "stored after a barrier": ("FILL PROXY BLOCK STORE STORED", ""),
    "stored without a barrier": ("FILL PROXY STORE STORED", "tma_store reads shared byte"),
    "written after the store": ("FILL PROXY BLOCK STORE STORED BLOCK WRITE", ""),
    "written with no wait for the store": (
        "FILL PROXY BLOCK STORE STORED WRITE",
        "which a tma_store reads|without a fence",
    ),
    "passing by": (
        "if (warp == 0) { ptx::store_shared(shared + lane * 4, 1u); ptx::arrive_some(1, 64); } "
        "if (warp == 1) { ptx::sync_some(1, 64); ptx::load_shared<u32>(shared + lane * 4); }",
        "",
    ),
    "written after passing by": (
        "if (warp == 0) { ptx::arrive_some(1, 64); ptx::store_shared(shared + lane * 4, 1u); } "
        "if (warp == 1) { ptx::sync_some(1, 64); ptx::load_shared<u32>(shared + lane * 4); }",
        "with no barrier between",
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_races(race: str) -> None:
    body, message = RACES[race]
    for seed in SEEDS:
        if message:
            with pytest.raises(EmulatorError, match=message):
                run(body, seed=seed, race_check=True)
        else:
            run(body, seed=seed, race_check=True)
