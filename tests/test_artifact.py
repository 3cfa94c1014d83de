"""An artifact's bytes prove themselves: whatever is done to them, they give the same artifact or Damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitattn import artifact
from jitattn.artifact import Artifact, is_key, key_of
from jitattn.errors import Damaged

SOURCE = "// kernel\nint answer() { return 42; } // π\n" * 50
BINARY = bytes(range(256)) * 8
HEAD = struct.Struct("<8sIIIIQ")


def sample(**changes: object) -> Artifact:
    made = Artifact.create(
        SOURCE, BINARY, target="host:x86-64-v3", entry="jitattn_run", toolchain="g++ 12.2", flags=("-O3",),
        compile_seconds=0.65, resources={"registers": 168}, description="forward",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


DATA = sample().to_bytes()
KEY = key_of(SOURCE)


def boundaries() -> dict[str, int]:
    """Where each part of DATA begins."""
    _, _, meta, packed, _, binary = HEAD.unpack_from(DATA)
    starts = {"magic": 0, "format": 8, "meta length": 12, "packed length": 16, "source length": 20}
    starts |= {"binary length": 24, "meta": HEAD.size, "source": HEAD.size + meta}
    starts |= {"binary": HEAD.size + meta + packed, "sum": HEAD.size + meta + packed + binary}
    assert starts["sum"] + 32 == len(DATA)
    return starts


def sealed(
    meta: bytes = b"{}",
    packed: bytes | None = None,
    size: int | None = None,
    source: bytes = SOURCE.encode(),
    binary: bytes = b"",
) -> bytes:
    """Bytes with a right check sum, as an attacker or a bug would write them."""
    packed = zlib.compress(source) if packed is None else packed
    size = len(source) if size is None else size
    head = HEAD.pack(b"jitattn\n", 1, len(meta), len(packed), size, len(binary))
    body = head + meta + packed + binary
    return body + hashlib.sha256(body).digest()


def test_round_trip() -> None:
    original = sample()
    again = Artifact.from_bytes(original.to_bytes(), original.key)
    assert again == original
    assert again.binary == BINARY and again.source == SOURCE
    assert again.meta["flags"] == ["-O3"] and again.meta["resources"] == {"registers": 168}


def test_equal_artifacts_give_equal_bytes() -> None:
    first = Artifact(KEY, SOURCE, BINARY, {"a": 1, "b": [1, 2]})
    second = Artifact(KEY, SOURCE, BINARY, {"b": (1, 2), "a": 1})
    assert first == second and first.to_bytes() == second.to_bytes()


@pytest.mark.parametrize("source", ["", "x", "int x;\r\n\0", "é" * 100_000])
@pytest.mark.parametrize("binary", [b"", b"\0" * 100_000])
def test_unusual_contents(source: str, binary: bytes) -> None:
    original = Artifact(key_of(source), source, binary, {})
    assert Artifact.from_bytes(original.to_bytes(), original.key) == original


@pytest.mark.parametrize("part", boundaries())
def test_truncated_in_every_part(part: str) -> None:
    start = boundaries()[part]
    for length in {start, start + 1, start + 3}:
        with pytest.raises(Damaged):
            Artifact.from_bytes(DATA[:length], KEY)


@pytest.mark.parametrize("part", boundaries())
@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_in_every_part(part: str, bit: int) -> None:
    for offset in range(boundaries()[part], boundaries()[part] + 4):
        data = bytearray(DATA)
        data[offset] ^= 1 << bit
        with pytest.raises(Damaged):
            Artifact.from_bytes(bytes(data), KEY)


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255), st.integers(0, 2))
def test_any_change_of_a_byte_is_found(offset: int, change: int, kind: int) -> None:
    altered = bytes([DATA[offset] ^ change])
    data = [
        DATA[:offset] + altered + DATA[offset + 1 :],
        DATA[:offset] + altered + DATA[offset:],
        DATA[:offset] + DATA[offset + 1 :],
    ][kind]
    with pytest.raises(Damaged):
        Artifact.from_bytes(data, KEY)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_damaged(data: bytes) -> None:
    for attempt in (data, HEAD.pack(b"jitattn\n", 1, 0, 0, 0, 0) + data, DATA + data + b"\0"):
        with pytest.raises(Damaged):
            Artifact.from_bytes(attempt, KEY)


def test_another_entry_under_this_key_is_damaged() -> None:
    other = "int other;"
    with pytest.raises(Damaged, match="sha256"):
        Artifact.from_bytes(Artifact(key_of(other), other, b"", {}).to_bytes(), KEY)


@pytest.mark.parametrize(
    "data",
    {
        "meta is text": sealed(meta=b"plain"),
        "meta is a list": sealed(meta=b"[]"),
        "meta has NaN": sealed(meta=b'{"a":NaN}'),
        "meta is nested too deeply": sealed(meta=b"[" * 500_000),
        "meta has a huge number": sealed(meta=b'{"a":' + b"9" * 10_000 + b"}"),
        "meta is beyond its limit": sealed(meta=json.dumps({"a": "x" * (1 << 20)}).encode()),
        "source is not UTF-8": sealed(source=b"\xff\xfe"),
        "source is longer than stated": sealed(size=10),
        "source is shorter than stated": sealed(size=1 << 20),
        "source length is beyond its limit": sealed(size=artifact.MAX_SOURCE + 1),
        "source stream is cut": sealed(packed=zlib.compress(SOURCE.encode())[:-5]),
        "source stream has a tail": sealed(packed=zlib.compress(SOURCE.encode()) + b"tail"),
        "source is a bomb": sealed(packed=zlib.compress(bytes(200 << 20), 9), size=100),
        "source is no stream": sealed(packed=b"not zlib"),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_right_sum_over_wrong_contents_is_damaged(data: tuple[str, bytes]) -> None:
    with pytest.raises(Damaged):
        Artifact.from_bytes(data[1], KEY)


def test_what_cannot_be_read_back_is_never_made() -> None:
    with pytest.raises(ValueError, match="sha256"):
        Artifact("0" * 64, SOURCE, b"", {})
    for meta in ({"a": float("nan")}, {"a": object()}, {"a": b"bytes"}, {"a": "x" * (1 << 20)}):
        with pytest.raises(ValueError):
            Artifact(KEY, SOURCE, b"", meta)
    with pytest.raises(ValueError):
        Artifact.create("\ud800", b"", target="host", entry="f", toolchain="c++")


def test_keys() -> None:
    assert is_key(KEY) and hashlib.sha256(SOURCE.encode()).hexdigest() == KEY
    for wrong in (
        KEY.upper(),
        KEY[:-1],
        KEY + "0",
        KEY[:-1] + "g",
        KEY[:-1] + "\n",
        "",
        None,
        5,
        KEY.encode(),
    ):
        assert not is_key(wrong)


def test_needs_no_tensor_library_and_no_pickle() -> None:
    command = (
        "import sys; from jitattn import artifact;"
        "a = artifact.Artifact(artifact.key_of('x'), 'x', b'y', {});"
        "assert artifact.Artifact.from_bytes(a.to_bytes(), a.key) == a;"
        "print(sorted({'torch', 'numpy', 'pickle', 'diskcache'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "[]\n"
