"""Tensor maps, through which kernels have the copy engine (TMA) move boxes of a tensor. The driver writes them.

A map is made once for all calls of one shape. From call to call only the tensor's address changes, and where the
driver keeps it in the 128 bytes is found out by having it write two maps that differ in nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

from ..errors import JitattnError
from ..params import TensorMap

__all__ = ["Maps", "encode"]

_BYTES, _ALIGNMENT, _WORD = 128, 64, 8
# Of cuda.h: CU_TENSOR_MAP_DATA_TYPE_*, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, _FLOAT_OOB_FILL_NONE.
_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_NOT_INTERLEAVED, _SWIZZLE_128, _PROMOTION_256, _FILL_ZEROS = 0, 3, 3, 0
_PROBES = 0x7F00_0000_0000, 0x7E12_3456_7000  # addresses whose every byte a map that keeps them must show


class Maps:
    """The maps of a launch."""

    def __init__(self, library: ctypes.CDLL, maps: Sequence[TensorMap]) -> None:
        self._library, self._maps = library, tuple(maps)
        self._templates = tuple(encode(library, each, _PROBES[0]) for each in maps)
        place = _address_at(library, maps[0]) if maps else None
        # (of the struct: where an address goes, and the end; of the pointers: where it is, and the end)
        self._moves = None if place is None else [
            (each.offset + place, each.offset + place + _WORD, _WORD * each.pointer, _WORD * (each.pointer + 1))
            for each in maps
        ]  # fmt: skip

    def start(self, struct: memoryview) -> None:
        """Write all of the maps but their addresses."""
        for each, template in zip(self._maps, self._templates, strict=True):
            struct[each.offset : each.offset + _BYTES] = template

    def point(self, struct: memoryview, pointers: bytes) -> None:
        """Write their addresses, which are among the pointers of a call."""
        if self._moves is not None:
            for to, to_end, at, end in self._moves:
                struct[to:to_end] = pointers[at:end]
            return
        for each in self._maps:
            address = int.from_bytes(pointers[_WORD * each.pointer : _WORD * (each.pointer + 1)], "little")
            struct[each.offset : each.offset + _BYTES] = encode(self._library, each, address)


def encode(library: ctypes.CDLL, tensor: TensorMap, address: int) -> bytes:
    """The driver's form of a map.

    :raises JitattnError: the driver refuses it.
    """
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    at = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    rank = len(tensor.sizes)
    status = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), _DTYPES[tensor.dtype], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor.sizes), (ctypes.c_uint64 * (rank - 1))(*tensor.stride_bytes),
        (ctypes.c_uint32 * rank)(*tensor.box, *[1] * (rank - 2)), (ctypes.c_uint32 * rank)(*[1] * rank),
        _NOT_INTERLEAVED, _SWIZZLE_128, _PROMOTION_256, _FILL_ZEROS,
    )  # fmt: skip
    if status:
        raise JitattnError(f"the CUDA driver makes no tensor map of {tensor} (error {status})")
    return ctypes.string_at(at, _BYTES)


@functools.lru_cache(maxsize=64)
def _address_at(library: ctypes.CDLL, tensor: TensorMap) -> int | None:
    """Where a map keeps its address as a plain word; None if it does not."""
    one, other = (encode(library, tensor, address) for address in _PROBES)
    for at in range(0, _BYTES, _WORD):
        words = tuple(int.from_bytes(each[at : at + _WORD], "little") for each in (one, other))
        rest = one[:at] + one[at + _WORD :], other[:at] + other[at + _WORD :]
        if words == _PROBES and rest[0] == rest[1]:
            return at
    return None
