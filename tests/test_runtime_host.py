"""Launches: who does the blocks, and whose memory they use."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.runtime import team

pytestmark = pytest.mark.skipif(torch.get_num_threads() < 2, reason="launches on one core have no helpers")


def problem(seq: int = 300, heads: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, heads, seq, 16) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def everything(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    out = jitattn.attention(q, k, v, causal=True)
    return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_python_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    inputs = problem()
    expected = everything(*inputs)
    monkeypatch.setattr(team, "openmp", None)
    torch.set_num_threads(threads)
    for _ in range(20):  # helpers come early, late and not at all
        assert all(torch.equal(a, b) for a, b in zip(everything(*inputs), expected, strict=True))


@pytest.mark.parametrize("openmp", [True, False])
def test_many_threads_launch_at_once(monkeypatch: pytest.MonkeyPatch, openmp: bool) -> None:
    if not openmp:
        monkeypatch.setattr(team, "openmp", None)
    inputs = [problem(seq) for seq in (65, 130, 257, 300)]
    expected = [everything(*each) for each in inputs]
    wrong: list[int] = []

    def launch(number: int) -> None:
        for _ in range(10):
            found = everything(*inputs[number])
            if not all(torch.equal(a, b) for a, b in zip(found, expected[number], strict=True)):
                wrong.append(number)

    launching = [threading.Thread(target=launch, args=(number,)) for number in range(len(inputs))]
    for thread in launching:
        thread.start()
    for thread in launching:
        thread.join()
    assert not wrong


def test_torchs_own_threads_are_found() -> None:
    if "OpenMP" not in torch.__config__.parallel_info() or os.name == "nt":
        pytest.skip("this torch has no OpenMP run-time")
    assert team.openmp is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_launches_on_threads_of_its_own() -> None:
    inputs = problem()
    expected = everything(*inputs)
    child = os.fork()
    if child == 0:
        # torch's autograd refuses to run in a forked child, so only the forward is tried.
        with torch.no_grad():
            out = jitattn.attention(*inputs, causal=True)
        os._exit(0 if torch.equal(out, expected[0]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_scratch_is_aligned_kept_and_bounded() -> None:
    small = team.scratch(1000)
    assert small.address % team.ALIGNMENT == 0
    assert team.scratch(10) is team.scratch(10)
    large = team.scratch((64 << 20) + 1)
    assert large.address % team.ALIGNMENT == 0
    assert team.scratch(10).size < large.size
