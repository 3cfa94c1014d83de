"""What is asked for, with no torch in it: the description from which a kernel is planned, compiled and launched."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

__all__ = ["DTYPES", "Direction", "Problem"]

Direction = Literal["forward", "backward"]
DTYPES = ("float32", "bfloat16", "float16")


# The kernel's text depends on the field.
_COMPILED = {"kind": "compiled"}
# The field may choose among a handful of tile shapes, and is otherwise a run-time argument.
_PLANNED = {"kind": "planned"}
# The field reaches the kernel as an argument: another value compiles nothing.
_RUNTIME = {"kind": "runtime"}
# Kernels for GPUs depend on the field; the host's do not.
_GPU = {"kind": "gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call: q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim),
    v (batch, heads_kv, seq_kv, head_dim_v).

    With `causal`, row m sees key n when n <= m + diagonal: 0 aligns the top left corners, seq_kv - seq_q the bottom
    right ones. Strides and pointers belong to a launch; of them a problem has only how they are
    aligned, and whether any is 0.
    """

    direction: Direction = field(metadata=_COMPILED)
    dtype: str = field(metadata=_COMPILED)
    head_dim: int = field(metadata=_COMPILED)
    head_dim_v: int = field(metadata=_COMPILED)
    causal: bool = field(metadata=_COMPILED)
    seq_q: int = field(metadata=_PLANNED)
    seq_kv: int = field(metadata=_PLANNED)
    batch: int = field(metadata=_PLANNED)
    heads_q: int = field(metadata=_PLANNED)
    heads_kv: int = field(metadata=_PLANNED)
    diagonal: int = field(metadata=_RUNTIME)
    scale: float = field(metadata=_GPU)
    """An argument of every kernel; of those for GPUs some take only positive ones."""
    alignment: int = field(default=16, metadata=_GPU)
    """Bytes, 16, 8, 4 or 2, that divide the address of every row of the tensors that are read; 1 where neighbours
    within a row do not lie side by side."""
    repeats: bool = field(default=False, metadata=_GPU)
    """Whether a tensor that is read has the same elements all along a dimension: a stride of 0."""
    deterministic: bool = field(default=False, metadata=_GPU)
    """Whether gradients must be bitwise equal run after run. The host's always are."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.direction} {self.dtype} head dim {dims}{' causal' if self.causal else ''}"

    @classmethod
    def field_kinds(cls) -> dict[str, str]:
        """Each field's name and whether it is "compiled", "planned", "runtime" or "gpu"."""
        return {f.name: f.metadata["kind"] for f in fields(cls)}
