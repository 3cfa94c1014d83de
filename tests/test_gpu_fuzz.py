"""Random problems on a GPU, forward and backward, against the float64 oracle: those of test_fuzz.py.

HYPOTHESIS_PROFILE=deep runs thousands with a new seed; what it finds is printed as a Case to add to cases.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import jitattn
from tests import gpu, oracle
from tests.cases import Case, make_inputs
from tests.test_fuzz import problems

pytestmark = gpu.MARKS


@given(
    case=problems(),
    needs=st.sampled_from(
        [(True, True, True)] * 3 + [(True, False, False), (False, True, False), (False, False, True)]
    ),
    used=st.sampled_from(["both", "both", "out", "lse"]),
    deterministic=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
def test_random_problems(case: Case, needs: tuple[bool, bool, bool], used: str, deterministic: bool) -> None:
    event(f"{case.dtype} {case.causal}")
    inputs = make_inputs(case, "cuda")
    if used == "out":
        inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    elif used == "lse":
        inputs = replace(inputs, dout=torch.zeros_like(inputs.dout))
    leaves = [x.detach().requires_grad_(need) for x, need in zip((inputs.q, inputs.k, inputs.v), needs, strict=True)]
    with oracle.poisoned():
        out, lse = jitattn.attention(
            *leaves, scale=case.scale, causal=case.causal, return_lse=True, deterministic=deterministic
        )
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
