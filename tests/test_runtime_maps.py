"""Tensor maps of whole calls and launches, for every way in which a driver may keep an address: no GPU is needed."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from jitattn import launch, params, plan, target
from jitattn.config import KernelConfig
from jitattn.params import TensorMap
from jitattn.runtime import cuda, tma
from tests.cases import arrange

BYTES = 128
MAP = TensorMap(0, 64, "bfloat16", (64, 300, 8, 2), (128, 38400, 307200), (64, 128))


def plainly(address: int, rest: bytes) -> bytes:
    """As drivers do, though not in this place."""
    return rest[:16] + struct.pack("<Q", address) + rest[24:]


def scrambled(address: int, rest: bytes) -> bytes:
    return rest[:16] + struct.pack("<Q", address * 5 & 2**64 - 1) + rest[24:]


def with_a_sum(address: int, rest: bytes) -> bytes:
    """Plainly, but something else depends on the address as well."""
    return rest[:16] + struct.pack("<QQ", address, address >> 12) + rest[32:]


def in_between(address: int, rest: bytes) -> bytes:
    return rest[:20] + struct.pack("<Q", address) + rest[28:]


FORMS = {form.__name__: form for form in (plainly, scrambled, with_a_sum, in_between)}


class Library:
    """As much of the driver's library as makes tensor maps."""

    def __init__(self, form: Callable[[int, bytes], bytes] = plainly, status: int = 0) -> None:
        self.form, self.status, self.calls = form, status, 0

    def cuTensorMapEncodeTiled(
        self, at: ctypes.c_void_p, dtype: int, rank: int, address: ctypes.c_void_p, sizes: Any, strides: Any, box: Any,
        steps: Any, *flags: int,
    ) -> int:  # fmt: skip
        self.calls += 1
        if not self.status:
            said = dtype, rank, tuple(sizes), tuple(strides), tuple(box), tuple(steps), flags
            rest = hashlib.sha512(repr(said).encode()).digest() * 2
            ctypes.memmove(at.value or 0, self.form(address.value or 0, rest), BYTES)
        return self.status


def maps_of(library: Library, maps: tuple[TensorMap, ...]) -> tma.Maps:
    return tma.Maps(library, maps)  # type: ignore[arg-type]


def encode(library: Library, tensor: TensorMap, address: int) -> bytes:
    return tma.encode(library, tensor, address)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ those of a call


def attention_maps(
    direction: Any, q: Tensor, k: Tensor, v: Tensor
) -> tuple[params.Table, KernelConfig, tuple[TensorMap, ...]]:
    """The table, the configuration and the maps of a call's kernel that has some."""
    problem = dataclasses.replace(launch.describe(direction, q, k, v, None, "none"), alignment=16)
    names = {"forward": ("out",), "backward": ("out", "grad_out", "grad_q", "grad_k", "grad_v")}[direction]
    shapes = {"grad_q": q.shape, "grad_k": k.shape, "grad_v": v.shape}
    strides = {name: launch._dense(tuple(shapes.get(name, (*q.shape[:3], v.shape[3]))))[1] for name in names}
    values = launch._values(problem, strides | {"q": q.stride(), "k": k.stride(), "v": v.stride()}) | {"splits": 1}
    config = next(
        step.config
        for step in plan.make_plan(problem, target.parse("sm_90a")).steps
        if step.config.kernel in ("forward_warpgroups", "backward_warpgroups", "backward_wide")
    )
    table = params.FORWARD_BY_BOXES if direction == "forward" else params.BACKWARD_BY_BOXES
    return table, config, table.tensor_maps(config, values)


def tensors(layout: str = "bhsd", dim: int = 64, dim_v: int = 64, empty: str = "") -> tuple[Tensor, Tensor, Tensor]:
    size = {"batch": 2, "heads_q": 4, "heads_kv": 2, "seq_q": 3000, "seq_kv": 500} | ({empty: 0} if empty else {})
    shapes = [
        (size["batch"], size["heads_q"], size["seq_q"], dim),
        (size["batch"], size["heads_kv"], size["seq_kv"], dim),
        (size["batch"], size["heads_kv"], size["seq_kv"], dim_v),
    ]
    q, k, v = (lay_out(torch.zeros(shape, dtype=torch.bfloat16), layout) for shape in shapes)
    return q, k, v


def lay_out(x: Tensor, layout: str) -> Tensor:
    if layout == "sliced":  # a window of a larger tensor, all of whose rows are whole pieces of 16 bytes
        b, h, s, d = x.shape
        return x.new_zeros(b + 1, h + 2, s + 3, d + 24)[1:, 1 : 1 + h, 2 : 2 + s, 8 : 8 + d]
    return arrange(x, layout)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_struct_gets_what_the_driver_would_make(direction: str, form: str) -> None:
    library = Library(FORMS[form])
    table, _, made = attention_maps(direction, *tensors("bshd"))
    maps = maps_of(library, made)
    memory = bytearray(random.Random(0).randbytes(table.size))
    before = bytes(memory)
    maps.start(memoryview(memory))
    rng, calls = random.Random(1), library.calls
    for count in range(1, 4):
        addresses = [rng.randrange(2**43) * 16 for _ in table.pointers]
        maps.point(memoryview(memory), table.pack_pointers().pack(*addresses))
        assert library.calls == calls + (0 if form == "plainly" else count * len(made)), "asked only where it must be"
        for each in made:
            fresh = encode(Library(FORMS[form]), each, addresses[each.pointer])
            assert memory[each.offset : each.offset + BYTES] == fresh
    assert memory[: made[0].offset] == before[: made[0].offset] and made[-1].offset + BYTES == len(memory)
    assert all(b.offset == a.offset + BYTES for a, b in itertools.pairwise(made))


def test_structs_that_are_used_in_turns() -> None:
    library = Library()
    maps = maps_of(library, (MAP, dataclasses.replace(MAP, pointer=1, offset=192)))
    structs = [bytearray(320), bytearray(320)]
    for memory in structs:
        maps.start(memoryview(memory))
    for turn in range(6):
        maps.point(memoryview(structs[turn % 2]), struct.pack("<2Q", 16 * turn, 1024 * turn))
    for memory, turn in zip(structs, (4, 5), strict=True):
        assert memory[64:192] == encode(library, MAP, 16 * turn)
        assert memory[192:] == encode(library, MAP, 1024 * turn)


# ------------------------------------------------------------------------------------------------ layouts


def check_layout(x: Tensor, tensor: TensorMap) -> None:
    assert tensor.sizes == tuple(reversed(x.shape)) and tensor.dtype == "bfloat16"
    for size, stride, stride_bytes in zip(x.shape[:3], x.stride()[:3], reversed(tensor.stride_bytes), strict=True):
        assert 0 < stride_bytes < 2**40 and stride_bytes % 16 == 0
        assert size == 1 or stride_bytes == 2 * stride


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "packed", "sliced"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_layouts(direction: str, layout: str) -> None:
    q, k, v = tensors(layout, dim=80, dim_v=72)
    table, config, made = attention_maps(direction, q, k, v)
    by_name = {each.tensor: tensor for each, tensor in zip(table.boxes, made, strict=True)}
    out = v.new_zeros(*q.shape[:3], 72)
    dense = {"out": out, "grad_out": out, "grad_k": k.contiguous(), "grad_v": v.contiguous()}
    for name, x in ({"q": q, "k": k, "v": v} | dense).items():
        if name in by_name:
            check_layout(x, by_name[name])
    # Stores are of a warpgroup's 64 rows.
    rows = {"q": config.block_m, "grad_out": config.block_m, "k": config.block_n, "v": config.block_n}
    assert {name: each.box for name, each in by_name.items()} == {name: (64, rows.get(name, 64)) for name in by_name}
    assert all(table.pointers[each.pointer] == name for name, each in by_name.items())


def test_where_a_dimension_has_one_element_its_stride_does_not_count() -> None:
    base = torch.zeros(20_000, dtype=torch.bfloat16)
    q = base.as_strided((1, 1, 200, 64), (7, 13, 64, 1))
    k = base.as_strided((1, 1, 1, 64), (0, 3, 5, 1))
    assert launch._alignment(0, q, k) == 16
    _, _, made = attention_maps("forward", q, k, k)
    for x, tensor in zip((q, k, k), made, strict=False):
        check_layout(x, tensor)


@pytest.mark.parametrize("empty", ["batch", "heads_q", "seq_q"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_maps_of_empty_tensors_can_be_made(direction: str, empty: str) -> None:
    _, _, made = attention_maps(direction, *tensors(empty=empty))
    for tensor in made:
        assert all(size > 0 for size in tensor.sizes) and all(stride > 0 for stride in tensor.stride_bytes)


# ------------------------------------------------------------------------------------------------ launches


class Driver:
    """What a launch calls of CuPy's driver. The context 10 is the GPU's; `current` is this thread's."""

    def __init__(self, size: int, current: int = 10) -> None:
        self.size, self.current = size, current
        self.launched: list[bytes] = []

    def ctxGetCurrent(self) -> int:
        return self.current

    def ctxSetCurrent(self, context: int) -> None:
        self.current = context

    def launchKernel(self, *arguments: int) -> None:
        (at,) = ctypes.cast(arguments[-2], ctypes.POINTER(ctypes.c_void_p))[0:1]
        assert at and self.current == 10
        self.launched.append(ctypes.string_at(at, self.size))


def launch_of(blocks: int, library: Library, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    monkeypatch.setattr(cuda, "_libcuda", lambda: library)
    function = cuda._Function(handle=1, context=10, threads=384, shared_bytes=0)
    return cuda.Launch(function, blocks, bytes(driver.size), (MAP,))


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_finds_its_maps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, driver = Library(FORMS[form]), Driver(192)
    call = launch_of(5, library, driver, monkeypatch)
    for address in (0x7000, 0x7F00_1234_0010):
        call(struct.pack("<Q", address), lambda: 0)
        (at,) = struct.unpack_from("<Q", driver.launched[-1])
        assert at == address and driver.launched[-1][64:] == encode(library, MAP, address)


def test_a_launch_of_nothing_asks_for_no_map(monkeypatch: pytest.MonkeyPatch) -> None:
    library, driver = Library(status=1), Driver(192)
    launch_of(0, library, driver, monkeypatch)(bytes(8), lambda: 0)
    assert not library.calls and not driver.launched


@pytest.mark.xfail(strict=True, reason="maps are made before a context is current")
@pytest.mark.parametrize("form", FORMS)
def test_maps_are_made_where_a_context_is_current(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has done nothing on the GPU yet, as autograd's may be, has none: the driver then refuses."""
    driver = Driver(192, current=0)

    class Strict(Library):
        def cuTensorMapEncodeTiled(self, *arguments: Any) -> int:
            self.status = 0 if driver.current else 201
            return super().cuTensorMapEncodeTiled(*arguments)

    launch_of(1, Strict(FORMS[form]), driver, monkeypatch)(struct.pack("<Q", 16), lambda: 0)
    assert len(driver.launched) == 1 and driver.current == 0
