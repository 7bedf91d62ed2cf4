"""Every CPU implementation against the float64 oracle, on cases with poisoned memory and NaN-filled outputs."""

import math

import pytest
import torch
from ragged_cases import SHAPES, TYPES_AND_HEADS, make_case, tolerance

from laprox_sglang.attention.base import create
from laprox_sglang.attention.torch_reference import TorchRaggedAttention

ORACLE = TorchRaggedAttention(torch.float64)
NAMES = ["torch", "numba", "sdpa", "cpu"]


def check(name, case, logit_cap=0.0):
    out = case.poisoned_out()
    result = create(name).forward(*case.arguments(), logit_cap=logit_cap, out=out)
    expected = ORACLE.forward(*case.arguments(), logit_cap=logit_cap, out=torch.empty_like(case.q, dtype=torch.float64))
    assert result is out
    assert expected.isfinite().all()
    torch.testing.assert_close(result.double(), expected, **tolerance(case.q.dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(name, shape):
    check(name, make_case(**SHAPES[shape]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "group", "head_dim"), TYPES_AND_HEADS)
def test_types_and_heads(name, dtype, group, head_dim):
    for shape in ("decode_five", "extend_short", "mixed"):
        check(name, make_case(**SHAPES[shape], group=group, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_logit_cap(name):
    for shape in ("decode_lists", "mixed"):
        check(name, make_case(**SHAPES[shape], sharpness=20.0), logit_cap=5.0)


@pytest.mark.parametrize("name", NAMES)
def test_sharp_logits(name):
    """One row takes nearly all the weight, wherever it lies in the list: the running maximum must follow."""
    check(name, make_case(q_len=[1, 3], tail=[3, 90], lists=[500, 400], sharpness=40.0))


@pytest.mark.parametrize("name", NAMES)
def test_nan_in_a_listed_row_is_not_hidden(name):
    case = make_case(**SHAPES["extend_short"])
    case.k_rows[case.batch.rows.long()] = math.nan
    out = create(name).forward(*case.arguments())
    assert out[: case.batch.q_start_host[1], 0].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
def test_lse_of_lists(name, logit_cap):
    case = make_case(**SHAPES["decode_five"])
    q = 2 * torch.randn(5, 4, *case.q.shape[1:])
    arguments = (q, case.k_rows, case.layer, case.batch, case.scale, logit_cap)
    lse = create(name).lse_of_lists(*arguments)
    assert lse.dtype == torch.float32 and (lse == -math.inf).any() and lse.isfinite().any()
    torch.testing.assert_close(lse, ORACLE.lse_of_lists(*arguments), rtol=1e-5, atol=1e-5)
