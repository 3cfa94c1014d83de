"""Autograd beyond first gradients, torch.func, torch.compile, fake tensors, operator checks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import jitattn
from tests import cases, oracle
from tests.cases import Case, Causal, make_inputs


def _leaves(seq_q: int = 24, seq_kv: int = 24, dim: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((1, 4, seq_q, dim), (1, 2, seq_kv, dim), (1, 2, seq_kv, dim))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


# The reference backend is the documented path to higher derivatives.


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize("shape", [(2, 4), (4, 2)], ids=str)
def test_reference_gradients_of_every_order(causal: Causal, shape: tuple[int, int]) -> None:
    q = torch.randn(1, 2, shape[0], 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, shape[1], 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 1, shape[1], 3, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = jitattn.attention(q, k, v, causal=causal, return_lse=True, backend="reference")
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, v))


@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_reference_runs_under_torch_func(causal: Causal) -> None:
    q, k, v = (x.detach().double() for x in _leaves(5, 7, 4))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jitattn.attention(q, k, v, causal=causal, backend="reference").square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for ours, theirs in zip(grads, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.func.hessian(loss)(q, k, v).isfinite().all()


# Through a kernel: the first gradient only, and a clear error beyond it.


def test_double_backward_is_an_error_that_names_the_way() -> None:
    q, k, v = _leaves()
    out = jitattn.attention(q, k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="reference"'):
        torch.autograd.grad(grad.square().sum(), k)


def test_double_backward_by_the_output_gradient_is_an_error_too() -> None:
    """The gradient is linear in dout, and a penalty on it alone still needs the second derivative."""
    q, k, v = _leaves()
    out = jitattn.attention(q, k, v)
    dout = torch.randn_like(out, requires_grad=True)
    grads = torch.autograd.grad(out, (q, k, v), dout, create_graph=True)
    with pytest.raises(RuntimeError, match='backend="reference"'):
        torch.autograd.grad(torch.stack([g.sum() for g in grads]).sum(), dout)


def test_create_graph_alone_is_no_error() -> None:
    q, k, v = _leaves()
    plain = torch.autograd.grad(jitattn.attention(q, k, v).square().sum(), (q, k, v))
    loss = jitattn.attention(q, k, v).square().sum()
    graph = torch.autograd.grad(loss, (q, k, v), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))
    # A second derivative in which attention takes no part: the loss's own, 2 * w.
    w = torch.randn(3, requires_grad=True)
    out = jitattn.attention(q, k, v)
    (grad,) = torch.autograd.grad(out.detach().sum() * w.square().sum(), w, create_graph=True)
    grad.sum().backward()


def test_a_second_derivative_with_the_reference_backend() -> None:
    leaves = [x.detach().double().requires_grad_() for x in _leaves(6, 6, 4)]
    out = jitattn.attention(*leaves, causal=True, backend="reference")
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), leaves)
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in second)


def _right_or_refused(transform: Callable[[Callable[..., Tensor]], Any]) -> None:
    """The transform of a kernel-backed loss equals that of the reference, or raises; it is never another number."""

    def loss(backend: str | None) -> Callable[..., Tensor]:
        return lambda q, k, v: jitattn.attention(q, k, v, causal="top_left", backend=backend).square().sum()

    expected = transform(loss("reference"))
    try:
        got = transform(loss(None))
    except (RuntimeError, NotImplementedError) as error:
        assert str(error)
        return
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_forward_mode_is_right_or_refused() -> None:
    q, k, v = (x.detach() for x in _leaves())
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    _right_or_refused(lambda f: torch.func.jvp(f, (q, k, v), tangents))

    def dual(f: Callable[..., Tensor]) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip((q, k, v), tangents, strict=True)]
            tangent = torch.autograd.forward_ad.unpack_dual(f(*duals)).tangent
        assert tangent is not None, "a tangent was dropped"
        return tangent

    _right_or_refused(dual)


@pytest.mark.parametrize("what", ["grad", "vmap", "vmap of grad", "grad of grad", "jacrev"])
def test_torch_func_is_right_or_refused(what: str) -> None:
    q, k, v = (x.detach() for x in _leaves(6, 6, 8))
    batched = tuple(torch.stack([x, x + 1]) for x in (q, k, v))

    def transform(f: Callable[..., Tensor]) -> Any:
        if what == "grad":
            return torch.func.grad(f, argnums=(0, 1, 2))(q, k, v)
        if what == "vmap":
            return torch.func.vmap(f)(*batched)
        if what == "vmap of grad":
            return torch.func.vmap(torch.func.grad(f))(*batched)
        if what == "jacrev":
            return torch.func.jacrev(lambda q: f(q, k, v))(q)
        return torch.func.grad(lambda q: torch.func.grad(f)(q, k, v).sum())(q)

    _right_or_refused(transform)


def test_saved_tensors_can_be_offloaded_and_checkpointed() -> None:
    q, k, v = _leaves(40, 40)
    plain = torch.autograd.grad(jitattn.attention(q, k, v, causal=True).square().sum(), (q, k, v))
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = jitattn.attention(q, k, v, causal=True)
    assert len(packed) >= 3, "tensors are kept out of sight of saved-tensor hooks"
    hooked = torch.autograd.grad(out.square().sum(), (q, k, v))
    for reentrant in (True, False):
        out = checkpoint(lambda q, k, v: jitattn.attention(q, k, v, causal=True), q, k, v, use_reentrant=reentrant)
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        q.grad, k.grad, v.grad = grads
        out.square().sum().backward()
        for a, b, c in zip(plain, hooked, grads, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("layout", ["bshd", "packed", "padded", "strided", "expand_heads", "odd"])
def test_hooks_may_give_saved_tensors_back_with_other_strides(layout: str) -> None:
    """As offloading does: what it stores is contiguous, whatever the tensor was."""
    inputs = make_inputs(Case(heads_q=4, seq_q=33, seq_kv=47, layouts=cases.all_layouts(layout)))
    expected = oracle.run(inputs, jitattn.attention, causal="bottom_right")

    def attention(*tensors: Tensor, **options: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x.contiguous()):
            return jitattn.attention(*tensors, causal="bottom_right", **options)

    got = oracle.run(inputs, attention)
    for name in oracle.NAMES:
        torch.testing.assert_close(got[name], expected[name])


# Compiled and traced.


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile from a clean state, with nothing left over from other runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()


def _layer(q: Tensor, k: Tensor, v: Tensor, causal: Causal = False) -> tuple[Tensor, Tensor]:
    """Operations before and after, so that a wrong stride or dtype of the fake outputs shows."""
    out, lse = jitattn.attention(q * 1.5, k, v.sin(), causal=causal, return_lse=True)
    return out.transpose(1, 2).flatten(2).relu(), lse.exp() + 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_compile_fullgraph(backend: str, causal: Causal) -> None:
    layer = torch.compile(_layer, fullgraph=True, backend=backend)
    for needs in (True, False):
        leaves = [x.requires_grad_(needs) for x in (y.detach() for y in _leaves(24, 40))]
        eager, compiled = _layer(*leaves, causal=causal), layer(*leaves, causal=causal)
        torch.testing.assert_close(compiled, eager)
        if needs:
            cotangents = [torch.randn_like(x) for x in eager]
            expected = torch.autograd.grad(eager, leaves, cotangents)
            torch.testing.assert_close(torch.autograd.grad(compiled, leaves, cotangents), expected)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("layout", ["bshd", "bhds", "padded", "expand_heads", "strided"])
def test_compile_with_any_strides(layout: str) -> None:
    inputs = make_inputs(Case(batch=2, heads_q=4, heads_kv=2, seq_q=9, seq_kv=12, layouts=cases.all_layouts(layout)))
    layer = torch.compile(jitattn.attention, fullgraph=True, backend="aot_eager")

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return layer(q, k, v, causal="bottom_right", **options)

    got = oracle.run(inputs, attention)
    expected = oracle.run(inputs, jitattn.attention, causal="bottom_right")
    for name in oracle.NAMES:
        torch.testing.assert_close(got[name], expected[name])
        assert got[name].stride() == expected[name].stride() or name.startswith("d")


@pytest.mark.usefixtures("compiler")
def test_compile_with_dynamic_shapes() -> None:
    traced = 0

    def count(graph: torch.fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        nonlocal traced
        traced += 1
        return graph.forward

    layer = torch.compile(_layer, fullgraph=True, backend=count, dynamic=True)
    whole = torch.compile(_layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq_q, seq_kv in ((24, 40), (25, 41), (77, 130), (31, 200)):
        leaves = _leaves(seq_q, seq_kv)
        eager = _layer(*leaves, causal="bottom_right")
        torch.testing.assert_close(layer(*leaves, causal="bottom_right"), eager)
        compiled = whole(*leaves, causal="bottom_right")
        torch.testing.assert_close(compiled, eager)
        cotangents = [torch.randn_like(x) for x in eager]
        expected = torch.autograd.grad(eager, leaves, cotangents)
        torch.testing.assert_close(torch.autograd.grad(compiled, leaves, cotangents), expected)
    assert traced == 1, "a length became part of the graph"


@pytest.mark.usefixtures("compiler")
def test_compile_a_module_that_trains() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return x + jitattn.attention(q, k, v, causal=True).transpose(1, 2).flatten(2)

    block, x = Block(), torch.randn(2, 20, 32)
    eager = torch.autograd.grad(block(x).square().mean(), list(block.parameters()))
    compiled = torch.compile(block, fullgraph=True, backend="inductor")
    ours = torch.autograd.grad(compiled(x).square().mean(), list(block.parameters()))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_fake_tensors(dtype: torch.dtype) -> None:
    """Right shapes, strides and dtypes without a kernel: nothing is compiled and nothing is read."""
    before = jitattn.stats()["compiled"]
    real = jitattn.attention(*(x.detach() for x in _leaves(9, 12, 64, dtype)), return_lse=True)
    after = jitattn.stats()["compiled"]
    with FakeTensorMode():
        leaves = _leaves(9, 12, 59, dtype)
        out, lse = jitattn.attention(*leaves, return_lse=True)
        grads = torch.autograd.grad((out, lse), leaves, (torch.empty_like(out), torch.empty_like(lse)))
    assert jitattn.stats()["compiled"] == after and after <= before + 1
    assert out.shape == (1, 4, 9, 59) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (1, 4, 9) and lse.dtype == torch.float32
    assert len(real[0].stride()) == 4 and real[1].stride() == lse.stride()
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.shape == leaf.shape and grad.dtype == dtype


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "padded"])
def test_operators_keep_torchs_rules(causal: str, layout: str) -> None:
    """Schema, fakes, autograd registration and dynamic AOT dispatch, by torch's own checks of a custom operator."""
    case = Case(heads_kv=1, seq_q=9, seq_kv=12, layouts=cases.all_layouts(layout))
    inputs = make_inputs(case)
    importlib.import_module("jitattn.ops")  # which registers them
    operators = torch.ops.jitattn
    for needs in (True, False):
        q, k, v = (x.detach().requires_grad_(needs) for x in (inputs.q, inputs.k, inputs.v))
        torch.library.opcheck(operators.attention.default, (q, k, v, 0.25, causal))
    out, lse = operators.attention(inputs.q, inputs.k, inputs.v, None, causal)
    for dlse in (inputs.dlse, None):
        arguments = (inputs.dout, dlse, inputs.q, inputs.k, inputs.v, out, lse, None, causal)
        torch.library.opcheck(operators.attention_backward.default, arguments)


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return jitattn.attention(q, k, v, causal="bottom_right")

    leaves = tuple(x.detach() for x in _leaves(20, 30))
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(Layer(), leaves, dynamic_shapes=({2: length}, None, None))
    others = (torch.randn(1, 4, 27, 16), *leaves[1:])
    torch.testing.assert_close(program.module()(*others), Layer()(*others))
