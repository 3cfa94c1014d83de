"""The host backend's threads, those of Python that call it, and forked children."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import jitattn
from tests import cases, oracle
from tests.cases import Case, make_inputs


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("case", cases.SMOKE[:3], ids=str)
def test_any_number_of_torch_threads(case: Case, threads: int) -> None:
    torch.set_num_threads(threads)
    oracle.verify(case, jitattn.attention)


def test_one_torch_thread_uses_one_core() -> None:
    x = torch.randn(1, 8, 1024, 64)
    torch.set_num_threads(1)
    jitattn.attention(x, x, x)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(3):
        jitattn.attention(x, x, x)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert cpu < 1.3 * wall + 0.02


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("shape", [(1, 8, 1024, 64), (1, 1, 4096, 64)], ids=str)
def test_two_torch_threads_share_the_work(shape: tuple[int, ...]) -> None:
    """One head alone keeps both busy too. Counted in processor time, so that other work does not matter."""
    x = torch.randn(shape)
    torch.set_num_threads(2)
    jitattn.attention(x, x, x)

    def elsewhere() -> float:
        here, everywhere = time.thread_time(), time.process_time()
        for _ in range(3):
            jitattn.attention(x, x, x)
        return 1 - (time.thread_time() - here) / (time.process_time() - everywhere)

    assert max(elsewhere() for _ in range(5)) > 0.25


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(0), work(1), ... at the same moment; raise the first error."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_many_python_threads_at_once() -> None:
    work = cases.SMOKE + cases.SHAPES[3:9]
    prepared = [make_inputs(case) for case in work]
    expected = [jitattn.attention(x.q, x.k, x.v, causal=c.causal) for c, x in zip(work, prepared, strict=True)]

    def call(index: int) -> None:
        for turn in range(4 * len(work)):
            which = (index * 5 + turn) % len(work)
            x = prepared[which]
            out = jitattn.attention(x.q, x.k, x.v, causal=work[which].causal)
            assert torch.equal(out, expected[which]), str(work[which])

    _in_threads(6, call)


def test_many_python_threads_train_at_once() -> None:
    work = cases.SMOKE
    prepared = [make_inputs(case) for case in work]
    options = [{"causal": case.causal, "scale": case.scale} for case in work]

    def step(which: int) -> tuple[Tensor, ...]:
        inputs = prepared[which]
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out = jitattn.attention(q, k, v, **options[which])
        return torch.autograd.grad(out, (q, k, v), inputs.dout)

    expected = [step(which) for which in range(len(work))]

    def call(index: int) -> None:
        for turn in range(3 * len(work)):
            which = (index + turn) % len(work)
            for got, grad in zip(step(which), expected[which], strict=True):
                assert torch.equal(got, grad), str(work[which])

    _in_threads(5, call)


def test_threads_that_need_the_same_new_kernel_compile_it_once() -> None:
    def made() -> int:  # or read, where an earlier run has left it in the cache
        return jitattn.stats()["compiled"] + jitattn.stats()["disk_hits"]

    x = torch.randn(1, 2, 50, 23)
    before = made()
    outs: list[Tensor] = []
    _in_threads(6, lambda _: outs.append(jitattn.attention(x, x, x)))
    assert made() == before + 1
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_too(run_python: Callable[..., str]) -> None:
    """Data-loader workers are forked; the parent's threads and locks do not exist in them.

    torch's own parallel operations would hang in such a child, so it compares bytes, and gives up by itself.
    """
    script = (
        "import math, os, signal, torch, jitattn\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(1, 4, 300, 64)\n"
        "out = jitattn.attention(x, x, x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(60)\n"
        "    again = jitattn.attention(x, x, x)\n"
        "    new = jitattn.attention(x, x, x, causal=True)\n"
        "    same = again.numpy().tobytes() == out.numpy().tobytes()\n"
        "    os._exit(0 if same and math.isfinite(new[0, 3, 299, 63]) else 3)\n"
        "print('child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert "child ended with 0" in run_python(script)


def test_calls_do_not_keep_memory() -> None:
    x = torch.randn(1, 2, 64, 64)
    resource = pytest.importorskip("resource")
    for _ in range(200):
        jitattn.attention(x, x, x)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2000):
        jitattn.attention(x, x, x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "kilobytes"
