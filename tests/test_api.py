"""What `attention` refuses, before anything is compiled, and what it says to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.errors import JitattnError, Unsupported

MISUSE = (ValueError, TypeError, JitattnError)


def _qkv(seq_q: int = 8, seq_kv: int = 8, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, 4, n, 16, **options) for n in (seq_q, seq_kv, seq_kv))  # type: ignore[return-value]


def test_causal_true_is_refused_when_lengths_differ() -> None:
    with pytest.raises(MISUSE, match="(?s)top_left.*bottom_right|bottom_right.*top_left"):
        jitattn.attention(*_qkv(8, 12), causal=True)


@pytest.mark.parametrize("causal", ["diagonal", "TOP_LEFT", 2, "none?"])
def test_an_unknown_causal_is_refused(causal: Any) -> None:
    with pytest.raises(MISUSE, match="causal"):
        jitattn.attention(*_qkv(), causal=causal)


def test_float64_names_what_takes_it() -> None:
    with pytest.raises(Unsupported, match="(?s)float64.*(float32|reference)"):
        jitattn.attention(*_qkv(dtype=torch.float64))
    out = jitattn.attention(*_qkv(dtype=torch.float64), backend="reference")
    assert out.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 2, 4, 8, dtype=dtype)
    for backend in (None, "reference"):
        with pytest.raises(MISUSE, match=str(dtype).removeprefix("torch.")):
            jitattn.attention(x, x, x, backend=backend)


def _shape(*sizes: int, **options: Any) -> Tensor:
    return torch.zeros(*sizes, **options)


BAD_CALLS = {
    "batch of k": (_shape(2, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16)),
    "batch of v": (_shape(2, 4, 8, 16), _shape(2, 4, 8, 16), _shape(1, 4, 8, 16)),
    "head dim of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 32), _shape(1, 4, 8, 16)),
    "heads not a multiple": (_shape(1, 4, 8, 16), _shape(1, 3, 8, 16), _shape(1, 3, 8, 16)),
    "more key heads": (_shape(1, 2, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16)),
    "heads of v": (_shape(1, 4, 8, 16), _shape(1, 2, 8, 16), _shape(1, 4, 8, 16)),
    "no key heads": (_shape(1, 4, 8, 16), _shape(1, 0, 8, 16), _shape(1, 0, 8, 16)),
    "length of v": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 9, 16)),
    "three dimensions": (_shape(4, 8, 16), _shape(4, 8, 16), _shape(4, 8, 16)),
    "five dimensions": (_shape(1, 1, 4, 8, 16), _shape(1, 1, 4, 8, 16), _shape(1, 1, 4, 8, 16)),
    "dtype of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16).half(), _shape(1, 4, 8, 16)),
    "dtype of v": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16), _shape(1, 4, 8, 16).bfloat16()),
    "device of k": (_shape(1, 4, 8, 16), _shape(1, 4, 8, 16, device="meta"), _shape(1, 4, 8, 16)),
    "no head dim": (_shape(1, 4, 8, 0), _shape(1, 4, 8, 0), _shape(1, 4, 8, 16)),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("call", BAD_CALLS)
def test_tensors_that_do_not_fit_are_refused(call: str, backend: str | None) -> None:
    q, k, v = BAD_CALLS[call]
    with pytest.raises(MISUSE):
        jitattn.attention(q, k, v, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cuda", "hip", "cpu", "tpu"])
def test_backends_that_cannot_take_these_tensors_are_refused(backend: str) -> None:
    with pytest.raises(MISUSE, match=backend):
        jitattn.attention(*_qkv(), backend=backend)


LATER = {
    "window": 4,
    "softcap": 30.0,
    "alibi_slopes": torch.ones(4),
    "bias": torch.zeros(8, 8),
    "mask": torch.ones(8, 8, dtype=torch.bool),
    "sink": torch.zeros(4),
    "score_mod": lambda score, b, h, m, n: score,
    "block_mask": lambda b, h, m, n: m >= n,
    "dropout_p": 0.1,
}


@pytest.mark.parametrize("backend", [None, "host", "reference"])
@pytest.mark.parametrize("option", LATER)
def test_an_option_is_obeyed_or_refused(option: str, backend: str | None) -> None:
    with pytest.raises(Unsupported, match=option):
        jitattn.attention(*_qkv(), backend=backend, **{option: LATER[option]})


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_defaults_of_every_option_may_be_written_out(backend: str | None) -> None:
    q, k, v = _qkv()
    spelled: dict[str, Any] = dict.fromkeys(LATER) | {"softcap": 0.0, "dropout_p": 0.0, "deterministic": True}
    expected = jitattn.attention(q, k, v, backend=backend)
    assert torch.equal(jitattn.attention(q, k, v, backend=backend, scale=0.25, **spelled), expected)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        jitattn.attention(*_qkv(), is_causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        jitattn.attention(*_qkv(), None)  # type: ignore[misc]


@pytest.mark.parametrize("scale", ["1", None, 1, torch.tensor(0.5)], ids=str)
def test_scale_may_be_what_float_takes_or_is_refused(scale: Any) -> None:
    q, k, v = _qkv()
    try:
        out = jitattn.attention(q, k, v, scale=scale)
    except MISUSE:
        assert isinstance(scale, (str, Tensor))
        return
    expected = jitattn.attention(q, k, v, scale=0.25 if scale is None else float(scale))
    assert torch.equal(out, expected)
