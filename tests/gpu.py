"""What the tests of a GPU share: `python -m pytest -m gpu` runs them, on a machine that has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jitattn
from tests import oracle
from tests.cases import Case, Inputs

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")]

LARGEST_HEAD_DIM = 256


def fits(case: Case) -> bool:
    """Whether kernels for GPUs take the case."""
    return max(case.head_dim, case.head_dim_v) <= LARGEST_HEAD_DIM


def run(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Forward and backward; `deterministic` is said, since poisoned memory comes with torch's own switch for it."""
    return oracle.run(inputs, jitattn.attention, **{"deterministic": False, **options})
