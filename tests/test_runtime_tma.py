"""Tensor maps, with a stand-in for the driver that writes them."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from jitattn import params
from jitattn.config import KernelConfig
from jitattn.errors import JitattnError
from jitattn.runtime import tma

CONFIG = KernelConfig("forward_warpgroups", "bfloat16", 72, 64, False, 128, 96)
SIZES = {"batch": 3, "heads_q": 8, "heads_kv": 2, "seq_q": 500, "seq_kv": 0, "diagonal": 0, "splits": 1, "scale": 1.0}
STRIDES = {
    "q_batch": 288_000,
    "q_head": 72,
    "q_row": 576,
    "q_dim": 1,
    "k_batch": 0,
    "k_head": 0,
    "k_row": 0,
    "k_dim": 1,
    "v_batch": 64,
    "v_head": 128,
    "v_row": 7,
    "v_dim": 1,
    "out_batch": 256_000,
    "out_head": 32_000,
    "out_row": 64,
}
MAPS = params.FORWARD_BY_BOXES.tensor_maps(CONFIG, SIZES | STRIDES)


class Driver:
    """Writes what it is given; the address as it is, or `mixed` into two words."""

    def __init__(self, mixed: bool = False, status: int = 0) -> None:
        self.mixed, self.status, self.calls = mixed, status, 0

    def cuTensorMapEncodeTiled(self, to: Any, dtype: int, rank: int, address: Any, *more: Any) -> int:
        sizes, strides, box, steps, *modes = more
        assert to.value % 64 == 0 and list(steps) == [1] * rank and modes == [0, 3, 3, 0]
        self.calls += 1
        at = address.value or 0
        words = (at & 0xFFFF_FFFF, at >> 32) if self.mixed else (0, at)
        ctypes.memmove(to.value, struct.pack("=14Q", dtype, *words, *sizes, *strides, *box), 112)
        return self.status


def test_what_a_map_says() -> None:
    q, k, v, out = MAPS
    assert q.sizes == (72, 500, 8, 3) and q.stride_bytes == (1152, 144, 576_000) and q.box == (64, 128)
    assert (q.pointer, k.pointer, v.pointer, out.pointer) == (0, 1, 2, 3)
    # Of no keys there is one, which nobody asks for, with any stride that is allowed.
    assert k.sizes == (72, 1, 2, 3) and k.stride_bytes[0] % 16 == 0 < k.stride_bytes[0] and k.box == (64, 96)
    assert out.sizes == (64, 500, 8, 3) and out.box == (64, 64)
    size = params.FORWARD_BY_BOXES.size
    assert [each.offset for each in MAPS] == [size - 128 * i for i in (4, 3, 2, 1)]
    assert all(each.offset % 64 == 0 for each in MAPS)


@pytest.mark.parametrize("mixed", [False, True])
def test_calls_point_maps_at_their_tensors(mixed: bool) -> None:
    driver: Any = Driver(mixed)
    maps = tma.Maps(driver, MAPS)
    struct_ = memoryview(bytearray(params.FORWARD_BY_BOXES.size))
    maps.start(struct_)
    before = driver.calls
    for base in (0x7000_1234_5670, 0x10, 0x7FFF_FFFF_FFF0):
        pointers = [base + 0x1000 * i for i in range(6)]
        maps.point(struct_, params.FORWARD_BY_BOXES.pack_pointers().pack(*pointers))
        assert mixed == (driver.calls > before), "only a driver that hides addresses is asked again"
        for each in MAPS:
            expected = tma.encode(driver, each, pointers[each.pointer])
            assert struct_[each.offset : each.offset + 128] == expected
        before = driver.calls


def test_a_refusal_says_of_what() -> None:
    with pytest.raises(JitattnError, match=r"no tensor map of TensorMap\(.*stride_bytes.*error 1"):
        tma.Maps(Driver(status=1), MAPS)  # type: ignore[arg-type]
