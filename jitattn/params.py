"""The launch parameters of every kernel, declared once: C++ struct text here, packed bytes there.

Order: pointers, then 64-bit integers, then floats, so that no compiler inserts padding between them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["BACKWARD", "FORWARD", "Table"]

_SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "diagonal")


def _strides(tensor: str, *, unit_last: bool = False) -> tuple[str, ...]:
    """A (B, H, S, D) tensor's strides in elements; a tensor that jitattn allocates has 1 as its last."""
    names = (f"{tensor}_batch", f"{tensor}_head", f"{tensor}_row")
    return names if unit_last else (*names, f"{tensor}_dim")


@dataclass(frozen=True)
class Table:
    """One kernel family's parameters. Pointers are to `Config::Element` or to float."""

    element_pointers: tuple[str, ...]
    float_pointers: tuple[str, ...]
    integers: tuple[str, ...]
    floats: tuple[str, ...] = ("scale",)

    @property
    def pointers(self) -> tuple[str, ...]:
        return self.element_pointers + self.float_pointers

    @property
    def size(self) -> int:
        """Bytes, the C++ struct's trailing padding included."""
        unpadded = 8 * (len(self.pointers) + len(self.integers)) + 4 * len(self.floats)
        return (unpadded + 7) // 8 * 8

    def cpp(self) -> str:
        """The struct's text. Its size is asserted, so the two declarations cannot drift apart."""
        lines = [f"  Config::Element* {name};" for name in self.element_pointers]
        lines += [f"  float* {name};" for name in self.float_pointers]
        lines += [f"  i64 {name};" for name in self.integers]
        lines += [f"  float {name};" for name in self.floats]
        return "\n".join(["struct Params {", *lines, "};", f"static_assert(sizeof(Params) == {self.size});"])

    def pack_pointers(self) -> struct.Struct:
        """Packs the pointers, which change with every call; they come first."""
        return struct.Struct(f"={len(self.pointers)}Q")

    def parameters(self, values: dict[str, int | float]) -> bytes:
        """The struct's bytes for the calls of one shape, with null pointers.

        :raises KeyError: a parameter has no value.
        """
        layout = struct.Struct(f"={8 * len(self.pointers)}x{len(self.integers)}q{len(self.floats)}f")
        return layout.pack(*(values[name] for name in self.integers + self.floats)).ljust(self.size, b"\0")


# One struct for all kernels of a forward pass, and one for all of a backward pass.
FORWARD = Table(
    element_pointers=("q", "k", "v", "out"),
    float_pointers=("lse", "workspace"),
    integers=(*_strides("q"), *_strides("k"), *_strides("v"), *_strides("out", unit_last=True), *_SIZES, "splits"),
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
