"""Tensor maps for the emulator's copy engine."""

from __future__ import annotations

import struct

from jitattn import params

__all__ = ["MAP_BYTES", "tensor_map"]

MAP_BYTES = 128
_MARK = 0x70616D20726F736E
_LAYOUT = struct.Struct("=2Q4q3q3I")


def tensor_map(x: params.TensorMap, address: int) -> bytes:
    """What a kernel finds where a GPU's driver puts a map of the tensor at this address: engine/tma.h's TensorMap."""
    return _LAYOUT.pack(_MARK, address, *x.sizes, *x.stride_bytes, *x.box, params.ELEMENT_BYTES[x.dtype])
