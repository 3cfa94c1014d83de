"""What is asked for, with no torch in it: the description from which a kernel is planned, compiled and launched."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

__all__ = ["DTYPES", "Direction", "Problem"]

Direction = Literal["forward", "backward"]
DTYPES = ("float32", "bfloat16", "float16")


def _compiled() -> Any:
    """A field that the kernel's text depends on."""
    return field(metadata={"kind": "compiled"})


def _planned() -> Any:
    """A field that may choose among a handful of tile shapes, and is otherwise a run-time argument."""
    return field(metadata={"kind": "planned"})


def _runtime() -> Any:
    """A field that reaches the kernel as an argument: another value compiles nothing."""
    return field(metadata={"kind": "runtime"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call: q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim),
    v (batch, heads_kv, seq_kv, head_dim_v).

    With `causal`, row m sees key n when n <= m + diagonal: 0 aligns the top left corners, seq_kv - seq_q the bottom
    right ones. Strides and pointers belong to a launch and are not part of a problem.
    """

    direction: Direction = _compiled()
    dtype: str = _compiled()
    head_dim: int = _compiled()
    head_dim_v: int = _compiled()
    causal: bool = _compiled()
    seq_q: int = _planned()
    seq_kv: int = _planned()
    batch: int = _planned()
    heads_q: int = _planned()
    heads_kv: int = _planned()
    diagonal: int = _runtime()
    scale: float = _runtime()

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return f"{self.direction} {self.dtype} head dim {dims}{' causal' if self.causal else ''}"

    @classmethod
    def field_kinds(cls) -> dict[str, str]:
        """Each field's name and whether it is "compiled", "planned" or "runtime"."""
        return {f.name: f.metadata["kind"] for f in fields(cls)}
