"""Artifact: one compiled kernel with its source and its story, and the bytes that carry all three.

Layout, little-endian::

    magic 8 | format u32 | meta u32 | packed source u32 | source u32 | binary u64    (lengths in bytes)
    meta (JSON) | source (zlib) | binary | sha256 of everything before it

The check sum finds damage. It is no signature: whoever may write the bytes may also write the sum, so
reading stays safe against chosen bytes too. Nothing is unpickled or evaluated, and no length is believed
before it has been compared with a limit and with what is there.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .errors import Damaged

__all__ = ["FORMAT", "Artifact", "is_key", "key_of"]

FORMAT = 1
MAGIC = b"jitattn\n"
MAX_META = 1 << 20
MAX_SOURCE = 16 << 20
MAX_BINARY = 256 << 20

_HEAD = struct.Struct("<8sIIIIQ")
_SUM_BYTES = hashlib.sha256().digest_size


def key_of(source: str) -> str:
    """The key of a kernel: sha256 of its whole translation unit, 64 lower-case hex digits."""
    return hashlib.sha256(source.encode()).hexdigest()


def is_key(text: object) -> bool:
    """Whether ``text`` has the form of a key."""
    return isinstance(text, str) and len(text) == 64 and not text.strip("0123456789abcdef")


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    ``key`` is ``key_of(source)``. ``meta`` holds JSON values: target, entry, toolchain (its identity),
    flags, compile_seconds, created (Unix seconds), resources (registers, spills, bytes of shared memory,
    as far as the toolchain tells) and description, a line for people.

    :raises ValueError: the key is not the source's, a part is too large, or meta is not JSON.
    """

    key: str
    source: str
    binary: bytes
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        source = self.source.encode()
        if hashlib.sha256(source).hexdigest() != self.key:
            raise ValueError(f"{self.key!r} is not the sha256 of the source")
        if len(source) > MAX_SOURCE or len(self.binary) > MAX_BINARY:
            raise ValueError(f"a source of {len(source)} or binary of {len(self.binary)} bytes is too large")
        # Through JSON once, so that an artifact equals itself read back (tuples become lists).
        meta = _dump_meta(self.meta)
        if len(meta) > MAX_META:
            raise ValueError(f"meta of {len(meta)} bytes is too large")
        object.__setattr__(self, "meta", json.loads(meta))

    @classmethod
    def create(
        cls,
        source: str,
        binary: bytes,
        *,
        target: str,
        entry: str,
        toolchain: str,
        flags: tuple[str, ...] = (),
        compile_seconds: float = 0.0,
        resources: Mapping[str, Any] | None = None,
        description: str = "",
    ) -> Artifact:
        """The artifact of a compile that has just ended."""
        meta = {
            "target": target,
            "entry": entry,
            "toolchain": toolchain,
            "flags": list(flags),
            "compile_seconds": round(compile_seconds, 4),
            "created": round(time.time(), 3),
            "resources": dict(resources or {}),
            "description": description,
        }
        return cls(key_of(source), source, binary, meta)

    def to_bytes(self) -> bytes:
        """The self-verifying bytes of this artifact; equal artifacts give equal bytes."""
        meta, source = _dump_meta(self.meta), self.source.encode()
        packed = zlib.compress(source)
        head = _HEAD.pack(MAGIC, FORMAT, len(meta), len(packed), len(source), len(self.binary))
        body = b"".join((head, meta, packed, self.binary))
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Artifact:
        """The artifact that ``data`` carries, which must be the one named ``key``.

        :raises Damaged: ``data`` is not, byte for byte, what ``to_bytes`` gives for that key.
        """
        meta, packed, source_bytes, binary = _split(data, key)
        source = _unpack(packed, source_bytes, key)
        try:
            return cls(key, source.decode(), bytes(binary), _load_meta(meta))
        except (ValueError, RecursionError) as error:
            _damaged(key, str(error))


def _split(data: bytes, key: str) -> tuple[bytes, memoryview, int, memoryview]:
    """(meta, packed source, length of the source, binary), after the head and the sum have been checked."""
    if len(data) < _HEAD.size + _SUM_BYTES:
        _damaged(key, f"{len(data)} bytes are too few")
    magic, version, meta_bytes, packed_bytes, source_bytes, binary_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC or version != FORMAT:
        _damaged(key, "it is not an artifact of this format")
    if meta_bytes > MAX_META or source_bytes > MAX_SOURCE or binary_bytes > MAX_BINARY:
        _damaged(key, "a length is beyond its limit")
    meta_end = _HEAD.size + meta_bytes
    packed_end = meta_end + packed_bytes
    binary_end = packed_end + binary_bytes
    if len(data) != binary_end + _SUM_BYTES:
        _damaged(key, f"{len(data)} bytes are there, {binary_end + _SUM_BYTES} were written")
    view = memoryview(data)
    if hashlib.sha256(view[:binary_end]).digest() != view[binary_end:]:
        _damaged(key, "its check sum differs")
    meta = bytes(view[_HEAD.size : meta_end])
    return meta, view[meta_end:packed_end], source_bytes, view[packed_end:binary_end]


def _unpack(packed: memoryview, size: int, key: str) -> bytes:
    """Exactly ``size`` bytes out of a zlib stream; no more is ever decompressed."""
    stream = zlib.decompressobj()
    try:
        # A limit of 0 would mean none, hence the one byte more; it also lets the stream reach its end mark.
        source = stream.decompress(packed, size + 1)
    except zlib.error as error:
        _damaged(key, str(error))
    if len(source) != size or not stream.eof or stream.unused_data:
        _damaged(key, "its source does not unpack to the stated length")
    return source


def _dump_meta(meta: dict[str, Any]) -> bytes:
    """Canonical JSON, so that equal meta gives equal bytes."""
    try:
        return json.dumps(meta, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except TypeError as error:
        raise ValueError(f"meta is not JSON: {error}") from None


def _load_meta(text: bytes) -> dict[str, Any]:
    meta = json.loads(text)
    if not isinstance(meta, dict):
        raise ValueError("meta is not an object")
    return meta


def _damaged(key: str, reason: str) -> NoReturn:
    raise Damaged(f"artifact {key[:12]}: {reason}")
