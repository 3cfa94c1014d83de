"""The launch parameters of every kernel, declared once: C++ struct text here, packed bytes there.

Order: pointers, then 64-bit integers, then floats, so that no compiler inserts padding between them; last the tensor
maps, each of which is as large as its alignment or a multiple of it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .config import KernelConfig

__all__ = ["BACKWARD", "BACKWARD_BY_BOXES", "FORWARD", "FORWARD_BY_BOXES", "Boxes", "Table", "TensorMap"]

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of CUDA's CUtensorMap
_MAP_CPP = f"struct alignas({_MAP_ALIGNMENT}) TensorMap {{ char opaque[{_MAP_BYTES}]; }};"
_BOX_ROW_BYTES = 128

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "diagonal")


def _strides(tensor: str, *, unit_last: bool = False) -> tuple[str, ...]:
    """A (B, H, S, D) tensor's strides in elements; a tensor that jitattn allocates has 1 as its last."""
    names = (f"{tensor}_batch", f"{tensor}_head", f"{tensor}_row")
    return names if unit_last else (*names, f"{tensor}_dim")


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor that a kernel has copied by boxes of so many rows; `rows` names a constant of the kernel's if it is no
    number. A box has 128 bytes of each row."""

    tensor: str
    heads: str
    length: str
    head_dim: str
    rows: str | int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What a kernel's tensor map says: a tensor (B, H, S, D) without gaps along D, copied by boxes with 128-byte
    swizzle. Sizes and strides are listed from the innermost dimension on, the strides from the second."""

    pointer: int
    """Which of the table's pointers its address is."""
    offset: int
    """Of its 128 bytes in the struct."""
    dtype: str
    sizes: tuple[int, int, int, int]
    stride_bytes: tuple[int, int, int]
    box: tuple[int, int]
    """Columns and rows."""


@dataclass(frozen=True)
class Table:
    """One kernel family's parameters. Pointers are to `Config::Element` or to float."""

    element_pointers: tuple[str, ...]
    float_pointers: tuple[str, ...]
    integers: tuple[str, ...]
    floats: tuple[str, ...] = ("scale",)
    boxes: tuple[Boxes, ...] = ()

    @property
    def pointers(self) -> tuple[str, ...]:
        return self.element_pointers + self.float_pointers

    @property
    def size(self) -> int:
        """Bytes, the C++ struct's trailing padding included."""
        return self._maps_offset + _MAP_BYTES * len(self.boxes)

    @property
    def _maps_offset(self) -> int:
        alignment = _MAP_ALIGNMENT if self.boxes else 8
        unpadded = 8 * (len(self.pointers) + len(self.integers)) + 4 * len(self.floats)
        return (unpadded + alignment - 1) // alignment * alignment

    def cpp(self) -> str:
        """The struct's text. Its size is asserted, so the two declarations cannot drift apart."""
        lines = [f"  Config::Element* {name};" for name in self.element_pointers]
        lines += [f"  float* {name};" for name in self.float_pointers]
        lines += [f"  i64 {name};" for name in self.integers]
        lines += [f"  float {name};" for name in self.floats]
        lines += [f"  TensorMap {each.tensor}_map;" for each in self.boxes]
        return "\n".join([
            *([_MAP_CPP] if self.boxes else []),
            "struct Params {", *lines, "};", f"static_assert(sizeof(Params) == {self.size});",
        ])  # fmt: skip

    def pack_pointers(self) -> struct.Struct:
        """Packs the pointers, which change with every call; they come first."""
        return struct.Struct(f"={len(self.pointers)}Q")

    def parameters(self, values: Mapping[str, int | float]) -> bytes:
        """The struct's bytes for the calls of one shape, with null pointers.

        :raises KeyError: a parameter has no value.
        """
        layout = struct.Struct(f"={8 * len(self.pointers)}x{len(self.integers)}q{len(self.floats)}f")
        return layout.pack(*(values[name] for name in self.integers + self.floats)).ljust(self.size, b"\0")

    def tensor_maps(self, config: KernelConfig, values: Mapping[str, int | float]) -> tuple[TensorMap, ...]:
        """What the struct's maps, null in `parameters`, must say for a kernel of that configuration."""
        return tuple(self._tensor_map(i, each, config, values) for i, each in enumerate(self.boxes))

    def _tensor_map(
        self, index: int, boxes: Boxes, config: KernelConfig, values: Mapping[str, int | float]
    ) -> TensorMap:
        element = ELEMENT_BYTES[config.dtype]

        def side(name: str, stride: str) -> tuple[int, int]:
            # Nothing is copied of an empty tensor, but no size may be 0; where there is but one, any stride will do.
            size = max(int(values[name]), 1)
            return size, int(values[f"{boxes.tensor}_{stride}"]) * element if size > 1 else _BOX_ROW_BYTES

        rows, heads, batch = side(boxes.length, "row"), side(boxes.heads, "head"), side("batch", "batch")
        box_rows: int = boxes.rows if isinstance(boxes.rows, int) else getattr(config, boxes.rows)
        return TensorMap(
            pointer=self.pointers.index(boxes.tensor),
            offset=self._maps_offset + _MAP_BYTES * index,
            dtype=config.dtype,
            sizes=(getattr(config, boxes.head_dim), rows[0], heads[0], batch[0]),
            stride_bytes=(rows[1], heads[1], batch[1]),
            box=(_BOX_ROW_BYTES // element, box_rows),
        )


# One struct for all kernels of a forward pass, and one for all of a backward pass.
FORWARD = Table(
    element_pointers=("q", "k", "v", "out"),
    float_pointers=("lse", "workspace"),
    integers=(*_strides("q"), *_strides("k"), *_strides("v"), *_strides("out", unit_last=True), *_SIZES, "splits"),
)

# The same with what a kernel needs that has its tensors copied by boxes.
FORWARD_BY_BOXES = replace(
    FORWARD,
    boxes=(
        Boxes("q", "heads_q", "seq_q", "head_dim", "block_m"),
        Boxes("k", "heads_kv", "seq_kv", "head_dim", "block_n"),
        Boxes("v", "heads_kv", "seq_kv", "head_dim_v", "block_n"),
        Boxes("out", "heads_q", "seq_q", "head_dim_v", 64),
    ),
)

# `grad_lse` may be null, and so may a `workspace` where the plan needs none. Its layout is the architecture's own:
# kernel_src/attn/partial.h, kernel_src/arch/gpu/attn/workspace.h.
BACKWARD = Table(
    element_pointers=("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"),
    float_pointers=("lse", "grad_lse", "workspace"),
    integers=(
        *_strides("q"), *_strides("k"), *_strides("v"), *_strides("out", unit_last=True), *_strides("grad_out"),
        *_strides("grad_q", unit_last=True), *_strides("grad_k", unit_last=True), *_strides("grad_v", unit_last=True),
        *_SIZES, "splits",
    ),
)  # fmt: skip
BACKWARD_BY_BOXES = replace(
    BACKWARD,
    boxes=(
        Boxes("q", "heads_q", "seq_q", "head_dim", "block_m"),
        Boxes("k", "heads_kv", "seq_kv", "head_dim", "block_n"),
        Boxes("v", "heads_kv", "seq_kv", "head_dim_v", "block_n"),
        Boxes("grad_out", "heads_q", "seq_q", "head_dim_v", "block_m"),
        Boxes("grad_k", "heads_kv", "seq_kv", "head_dim", 64),
        Boxes("grad_v", "heads_kv", "seq_kv", "head_dim_v", 64),
    ),
)
