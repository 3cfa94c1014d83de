"""Random problems on the host backend, forward and backward, against the float64 oracle.

HYPOTHESIS_PROFILE=deep runs thousands with a new seed; what it finds is printed as a Case to add to cases.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import jitattn
from tests import cases, oracle
from tests.cases import Case, make_inputs

# Few kernels, so that the time goes into problems and not into compiling; all else is free.
KERNELS = (
    (torch.float32, 64, 64),
    (torch.bfloat16, 64, 64),
    (torch.float16, 64, 64),
    (torch.float32, 33, 17),
    (torch.bfloat16, 40, 96),
    (torch.float16, 7, 130),
)
LENGTHS = st.one_of(
    st.integers(1, 40),
    st.integers(41, 300),
    st.sampled_from([0, 63, 64, 65, 127, 128, 129, 256, 257, 384, 385, 511, 777]),
)
SCALES = st.one_of(st.none(), st.sampled_from([0.0, -0.25, 1.0, 3.0]), st.floats(-1, 1, allow_subnormal=False))
LAYOUTS = st.one_of(st.just("bhsd"), st.sampled_from(cases.LAYOUTS + cases.EXPANDED))


@st.composite
def problems(draw: st.DrawFn) -> Case:
    dtype, head_dim, head_dim_v = draw(st.sampled_from(KERNELS))
    heads_kv = draw(st.sampled_from([1, 1, 2, 3]))
    case = Case(
        dtype,
        batch=draw(st.sampled_from([1, 1, 2, 3, 0])),
        heads_q=heads_kv * draw(st.sampled_from([1, 1, 2, 3, 5])),
        heads_kv=heads_kv,
        seq_q=draw(LENGTHS),
        seq_kv=draw(LENGTHS),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=draw(st.sampled_from(cases.CAUSAL)),
        scale=draw(SCALES),
        layouts=(draw(LAYOUTS), draw(LAYOUTS), draw(LAYOUTS), draw(LAYOUTS)),
        fill=draw(st.sampled_from(("normal", *cases.FILLS))),
    )
    assume(case.batch * case.heads_q * case.seq_q * case.seq_kv <= 1_500_000)
    return case


@given(
    case=problems(),
    needs=st.sampled_from(
        [(True, True, True)] * 3 + [(True, False, False), (False, True, False), (False, False, True)]
    ),
    used=st.sampled_from(["both", "both", "out", "lse"]),
    threads=st.sampled_from([1, 2, 2, 3]),
)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
def test_random_problems(case: Case, needs: tuple[bool, bool, bool], used: str, threads: int) -> None:
    event(f"{case.dtype} {case.causal}")
    torch.set_num_threads(threads)
    inputs = make_inputs(case)
    if used == "out":
        inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    elif used == "lse":
        inputs = replace(inputs, dout=torch.zeros_like(inputs.dout))
    leaves = [x.detach().requires_grad_(need) for x, need in zip((inputs.q, inputs.k, inputs.v), needs, strict=True)]
    with oracle.poisoned(inputs.q.numel(), inputs.k.numel(), inputs.v.numel(), inputs.dout.numel()):
        out, lse = jitattn.attention(*leaves, scale=case.scale, causal=case.causal, return_lse=True)
        results, cotangents = {
            "both": ((out, lse), (inputs.dout, inputs.dlse)),
            "out": ((out,), (inputs.dout,)),
            "lse": ((lse,), (inputs.dlse,)),
        }[used]
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(results, wanted, cotangents, materialize_grads=True)
    names = [name for name, need in zip(("dq", "dk", "dv"), needs, strict=True) if need]
    got = {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}
    oracle.check_all(got, oracle.expect(inputs, oracle.Problem(case.softmax_scale, case.diagonal)), got)
