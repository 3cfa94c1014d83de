"""Launches on a GPU: streams, graphs, devices, threads, processes, sizes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from jitattn.errors import JitattnError, ToolchainMissing, Unsupported
from tests import cases, gpu, oracle
from tests.cases import Case, make_inputs

pytestmark = gpu.MARKS
DEVICE = "cuda"


def leaves(*shape: int, dtype: torch.dtype = torch.float16, device: str = DEVICE) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]


def step(inputs: Sequence[Tensor], dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Output and gradients."""
    q, k, v = inputs
    out = jitattn.attention(q, k, v, **options)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


# ------------------------------------------------------------------------------------------------ streams


def test_work_is_put_on_the_current_stream() -> None:
    """A stream that is still busy writes q; only what waits for it sees the new values."""
    q, k, v = (x.detach() for x in leaves(2, 4, 300, 64))
    new = torch.randn_like(q)
    expected = jitattn.attention(new, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(new)
        out = jitattn.attention(q, k, v)
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_streams_side_by_side() -> None:
    inputs = [leaves(1, 4, 200 + n, 64) for n in range(4)]
    douts = [torch.randn_like(x[0]) for x in inputs]
    expected = [step(x, dout, deterministic=True) for x, dout in zip(inputs, douts, strict=True)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for x, dout, stream in zip(inputs, douts, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(step(x, dout, deterministic=True))
        torch.cuda.synchronize()
        for got, want in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ graphs


def capture(work: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seq", [100, 2000])
def test_a_captured_step_is_replayed_with_new_values(deterministic: bool, seq: int) -> None:
    q, k, v = leaves(1, 4, seq, 64)
    dout = torch.randn_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step((q, k, v), dout, causal=True, deterministic=deterministic)
    torch.cuda.current_stream().wait_stream(side)
    graph, result = capture(lambda: step((q, k, v), dout, causal=True, deterministic=deterministic))
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.normal_()
        graph.replay()
        expected = step((q, k, v), dout, causal=True, deterministic=deterministic)
        for got, want in zip(result, expected, strict=True):
            if deterministic:
                assert torch.equal(got, want)
            torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3)


def test_split_keys_are_captured_too() -> None:
    q = torch.randn(1, 2, 1, 64, dtype=torch.float16, device=DEVICE)
    k, v = (torch.randn(1, 2, 6000, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    jitattn.attention(q, k, v)
    graph, out = capture(lambda: jitattn.attention(q, k, v))
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, jitattn.attention(q, k, v))


def test_what_is_not_ready_is_refused_during_capture() -> None:
    """And compiled by a call before it, or by warmup alone, which launches nothing."""
    q, k, v = (x.detach() for x in leaves(1, 2, 50, 41))
    with pytest.raises(JitattnError, match="jitattn.warmup"):
        capture(lambda: jitattn.attention(q, k, v))
    torch.cuda.synchronize()
    report = jitattn.warmup((q, k, v))
    assert report.kernels == 1
    graph, out = capture(lambda: jitattn.attention(q, k, v))
    graph.replay()
    assert torch.equal(out, jitattn.attention(q, k, v))


def test_warmup_makes_a_training_step_ready() -> None:
    q, k, v = leaves(1, 2, 60, 43)
    dout = torch.randn_like(q)
    jitattn.warmup((q, k, v, {"causal": True, "deterministic": True}))
    graph, result = capture(lambda: step((q, k, v), dout, causal=True, deterministic=True))
    graph.replay()
    expected = step((q, k, v), dout, causal=True, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


# ------------------------------------------------------------------------------------------------ devices, threads


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current_one() -> None:
    inputs = make_inputs(Case(torch.float16, seq_q=100, seq_kv=130, causal="bottom_right"), "cuda:0")
    there = cases.Inputs(*(x.to("cuda:1") for x in vars(inputs).values()))
    expected = gpu.run(inputs, causal="bottom_right", deterministic=True)
    for current in (0, 1):
        with torch.cuda.device(current):
            got = gpu.run(there, causal="bottom_right", deterministic=True)
            assert torch.cuda.current_device() == current
        for name in oracle.NAMES:
            assert got[name].device == torch.device("cuda:1")
            assert torch.equal(got[name].cpu(), expected[name].cpu()), name
    with pytest.raises(ValueError, match="one device"):
        jitattn.attention(inputs.q, there.k, there.v)


def test_many_threads_launch_at_once() -> None:
    """Each is new to the GPU, and all launch the same few kernels."""
    work = [leaves(1, 2, seq, 64) for seq in (65, 130, 257, 300)]
    douts = [torch.randn_like(x[0]) for x in work]
    expected = [step(x, dout, deterministic=True) for x, dout in zip(work, douts, strict=True)]
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def call(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(20):
                    which = (number + turn) % len(work)
                    found = step(work[which], douts[which], deterministic=True)
                    torch.cuda.current_stream().synchronize()
                    if not all(torch.equal(a, b) for a, b in zip(found, expected[which], strict=True)):
                        wrong.append(which)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_has_done_nothing_on_the_gpu_yet() -> None:
    q, k, v = (x.detach() for x in leaves(1, 2, 64, 64))
    expected = jitattn.attention(q, k, v)
    torch.empty_like(expected)  # freed at once: the thread's output needs no new memory, and so no call of torch's
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(jitattn.attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


def test_processes_start_cold_on_one_cache(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    """Sixteen at once: each computes right, and what one has compiled the others mostly take."""
    text = (
        "import torch, jitattn\n"
        "torch.manual_seed(0)\n"
        "q, k, v = (torch.randn(1, 2, 90, 64, device='cuda').half().requires_grad_() for _ in range(3))\n"
        "out = jitattn.attention(q, k, v, causal=True, deterministic=True)\n"
        "grads = torch.autograd.grad(out.square().sum(), (q, k, v))\n"
        "import hashlib\n"
        "digest = hashlib.sha256(b''.join(x.detach().cpu().numpy().tobytes() for x in (out, *grads))).hexdigest()\n"
        "print(digest, jitattn.stats()['compiled'])\n"
    )
    env = {**subprocess_env, "JITATTN_CACHE_DIR": str(tmp_path / "cache"), "JITATTN_LOG": "quiet"}
    command, pipe = [sys.executable, "-c", text], subprocess.PIPE
    started = [subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) for _ in range(16)]
    said = [process.communicate(timeout=500) for process in started]
    assert [process.returncode for process in started] == [0] * 16, [err[-2000:] for _, err in said if err]
    digests, compiled = zip(*(out.split() for out, _ in said), strict=True)
    assert len(set(digests)) == 1
    assert sum(map(int, compiled)) <= 16, "each kernel was compiled by nearly every process"


# ------------------------------------------------------------------------------------------------ sizes


def _free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30


def test_strides_beyond_two_to_the_31_elements() -> None:
    if _free_gib() < 6:
        pytest.skip("needs 6 GiB")
    stride = 2**31 + 24
    memory = torch.empty(stride + 4 * 8 * 16, dtype=torch.float16, device=DEVICE)
    far = memory.as_strided((2, 2, 8, 16), (stride, 128, 16, 1))
    near = torch.randn(2, 2, 8, 16, device=DEVICE).half()
    far.copy_(near)
    dout = torch.randn_like(near)
    expected = gpu.run(cases.Inputs(near, near, near, dout, torch.zeros(2, 2, 8, device=DEVICE)), deterministic=True)
    got = gpu.run(cases.Inputs(far, far, far, dout, torch.zeros(2, 2, 8, device=DEVICE)), deterministic=True)
    for name in oracle.NAMES:
        assert torch.equal(got[name], expected[name]), name


@pytest.mark.parametrize("shape", [(520, 32, 1024, 128), (1, 2, 2**23 + 64, 128)], ids=str)
def test_tensors_beyond_two_to_the_31_elements(shape: tuple[int, int, int, int]) -> None:
    """Few keys where there are many rows, so that it ends. The last rows are those of a small call."""
    if _free_gib() < 70:
        pytest.skip("needs 70 GiB")
    batch, heads, seq, dim = shape
    keys = seq if batch > 1 else 100
    shapes = (shape, (batch, heads, keys, dim), (batch, heads, keys, dim))
    q, k, v = (torch.randn(each, dtype=torch.bfloat16, device=DEVICE).requires_grad_() for each in shapes)
    assert q.numel() > 2**31
    out = jitattn.attention(q, k, v, deterministic=False)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones((), dtype=out.dtype, device=DEVICE).expand(shape))
    first = seq - 300 if batch == 1 else 0
    small = [x[-1:, -1:, first if x is q else 0 :].detach().clone().requires_grad_() for x in (q, k, v)]
    some = jitattn.attention(*small, deterministic=False)
    torch.testing.assert_close(out[-1:, -1:, first:], some, rtol=1e-2, atol=1e-3)
    grads = torch.autograd.grad(some, small, torch.ones_like(some))
    torch.testing.assert_close(dq[-1:, -1:, first:], grads[0], rtol=1e-2, atol=1e-3)
    if batch > 1:
        torch.testing.assert_close(dk[-1:, -1:], grads[1], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(dv[-1:, -1:], grads[2], rtol=1e-2, atol=1e-3)


def test_calls_do_not_keep_memory() -> None:
    q, k, v = leaves(1, 2, 700, 64)
    dout = torch.randn_like(q)

    def held_after(steps: int) -> int:
        for _ in range(steps):
            step((q, k, v), dout)
        gc.collect()  # what other tests left in cycles
        torch.cuda.synchronize()
        time.sleep(0.2)  # autograd's thread lets go of its last task a moment after the gradients are there
        return torch.cuda.memory_allocated()

    assert held_after(1) >= held_after(50)


# ------------------------------------------------------------------------------------------------ torch, service


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend: str) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jitattn.attention(q * 1.5, k, v.sin(), causal="bottom_right", deterministic=True).relu()

    q, k, v = leaves(1, 4, 70, 64)
    eager, compiled = layer(q, k, v), torch.compile(layer, fullgraph=True, backend=backend)(q, k, v)
    torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-3)
    dout = torch.randn_like(eager)
    expected, got = (torch.autograd.grad(x, (q, k, v), dout) for x in (eager, compiled))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_operators_keep_torchs_rules(causal: str) -> None:
    inputs = make_inputs(Case(torch.float16, heads_kv=1, seq_q=9, seq_kv=12), DEVICE)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    jitattn.attention(q, k, v)  # which registers them
    torch.library.opcheck(torch.ops.jitattn.attention.default, (q, k, v, 0.25, causal, True))


def test_saved_tensors_may_be_offloaded() -> None:
    inputs = make_inputs(Case(torch.float16, heads_q=4, layouts=cases.all_layouts("packed")), DEVICE)
    expected = gpu.run(inputs, deterministic=True)

    def attention(*tensors: Tensor, **options: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return jitattn.attention(*tensors, deterministic=True, **options)

    got = oracle.run(inputs, attention)
    for name in oracle.NAMES:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-2, atol=1e-3)


def test_explain_says_what_the_gpu_runs() -> None:
    q, k, v = (x.detach() for x in leaves(2, 4, 200, 64))
    for direction in ("forward", "backward"):
        found = jitattn.explain(q, k, v, direction=direction)
        assert str(found.target).startswith("cuda:")
        for kernel in found.kernels:
            resources = kernel.artifact.meta["resources"]
            assert resources["registers"] > 0 and resources["threads"] % 32 == 0, kernel.config
            assert resources["spill_bytes"] == 0, kernel.config
        assert "registers" in str(found) and "shared_bytes" in str(found)


def test_backends() -> None:
    q, k, v = (x.detach() for x in leaves(1, 2, 30, 64))
    expected = jitattn.attention(q, k, v)
    assert torch.equal(jitattn.attention(q, k, v, backend="cuda"), expected)
    torch.testing.assert_close(jitattn.attention(q, k, v, backend="reference"), expected, rtol=1e-2, atol=1e-3)
    with pytest.raises(ValueError, match="backend .host."):
        jitattn.attention(q, k, v, backend="host")
    with pytest.raises(Unsupported, match="float64"):
        jitattn.attention(q.double(), k.double(), v.double())


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITATTN_NVRTC", str(tmp_path / "nothing.so"))
    q, k, v = (x.detach() for x in leaves(1, 2, 30, 45))
    with pytest.raises(ToolchainMissing, match=r"nothing.so.*pip install"):
        jitattn.attention(q, k, v)
    monkeypatch.delenv("JITATTN_NVRTC")
    assert jitattn.attention(q, k, v).isfinite().all()
