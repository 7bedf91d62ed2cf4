"""The kernels of the score against their references, and against what the policy makes of whole tensors."""

import math

import pytest
import torch
from interpreted import DEVICE, TYPES
from interpreted import pytestmark as pytestmark

from laprox_sglang.kernels import column_scores as columns
from laprox_sglang.kernels import projected_norm as projection
from laprox_sglang.policy.scores.base import LayerView, ScoreOptions
from laprox_sglang.policy.scores.laprox import LaProx

SIZES = [(1, 64), (3, 80), (5, 96), (6, 64), (7, 128), (12, 64), (16, 64), (2, 256)]  # G, D
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(columns, "BLOCK_M", 16)
    monkeypatch.setattr(columns, "BLOCK_N", 16)
    monkeypatch.setattr(columns, "BLOCK_T", 32)
    monkeypatch.setattr(columns, "BLOCK_W", 16)
    monkeypatch.setattr(columns, "BLOCK_POOL", 64)
    monkeypatch.setattr(projection, "BLOCK_T", 32)


def make(n, window, group=2, head_dim=64, dtype=torch.float32, layers=2, heads=2, seed=0):
    """(q, k, v, slots): a pool whose unused slots are NaN, and queries that are a strided view, as the ring's are."""
    torch.manual_seed(seed + n)
    k, v = (torch.full((layers, 2 * n + 3, heads, head_dim), math.nan, dtype=dtype) for _ in range(2))
    slots = torch.randperm(2 * n + 2)[:n] + 1
    for pool in (k, v):
        pool[:, slots] = torch.randn(layers, n, heads, head_dim).to(dtype)
    q = (2 * torch.randn(layers, 3, window, heads * group, head_dim)).to(dtype)[:, 1]
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE)


def poisoned(*shape):
    return torch.full(shape, math.nan, device=DEVICE)


def check_attention(case, first, scale, cap, mean=True, splits=1):
    q, k, _, slots = case
    layers, _, query_heads, _ = q.shape
    lse = columns.window_lse(q, k, slots, scale, cap, splits)
    torch.testing.assert_close(lse, columns.window_lse_reference(q, k, slots, scale, cap), rtol=2e-5, atol=2e-5)
    others = torch.randn(lse.shape, device=DEVICE)
    others[0, 0] = -math.inf
    total = torch.logaddexp(lse, others)
    out = poisoned(layers, k.shape[2], 1 if mean else query_heads // k.shape[2], slots.shape[0] - first)
    assert columns.column_norms(q, k, slots, total, first, scale, cap, mean, out) is out
    expected = columns.column_norms_reference(q, k, slots, total, first, scale, cap, mean)
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(("n", "window", "first"), [(1, 1, 0), (63, 5, 0), (100, 32, 33), (40, 40, 39), (200, 17, 1)])
def test_columns_at_odd_sizes(n, window, first):
    check_attention(make(n, window), first, 0.125, 0.0, splits=1 if n < 100 else 4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mean", [True, False])
def test_columns_of_every_type(dtype, mean):
    check_attention(make(50, 9, dtype=dtype), 3, 0.125, 0.0, mean)


@pytest.mark.parametrize(("group", "head_dim"), SIZES)
def test_columns_of_every_group_and_head_dim(group, head_dim):
    check_attention(make(35, 6, group, head_dim, torch.bfloat16, layers=1), 2, head_dim**-0.5, 0.0, group % 2 == 0)


def test_columns_with_a_logit_cap():
    check_attention(make(80, 8), 0, 2.0, 5.0, splits=2)


def test_a_split_that_a_query_does_not_see():
    """The last split holds only tokens after the first queries."""
    check_attention(make(40, 24), 0, 0.125, 0.0, splits=4)


def test_nan_in_a_key_is_not_hidden():
    q, k, _, slots = make(40, 4)
    k[1, slots[7], 0] = math.nan
    lse = columns.window_lse(q, k, slots, 0.125, splits=2)
    assert lse[1, 0].isnan().all() and lse[0].isfinite().all() and lse[1, 1].isfinite().all()
    assert columns.column_norms(q, k, slots, lse, 0, 0.125)[1, 0].isnan().all()


@pytest.mark.parametrize(("group", "head_dim"), SIZES)
def test_projected_norms(group, head_dim):
    dtype, mean = TYPES[group % 3], group % 2 == 0
    _, _, v, slots = make(35, 1, group, head_dim, dtype, layers=2)
    factors = torch.randn(2, 2, head_dim, group * head_dim).to(dtype).to(DEVICE)
    out = poisoned(2, 2, 1 if mean else group, 35)
    assert projection.projected_norm(v, slots, factors, mean, out) is out
    torch.testing.assert_close(out, projection.projected_norm_reference(v, slots, factors, mean), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("n", "kernel"), [(1, 1), (1, 21), (63, 7), (100, 21), (130, 1)])
@pytest.mark.parametrize("groups", [1, 3])
def test_pooled_scores(n, kernel, groups):
    torch.manual_seed(n)
    attention, norms = torch.rand(2, 2, 3, groups, n, device=DEVICE)
    out = poisoned(2, 3, n)
    assert columns.pooled_scores(attention, norms, kernel, out) is out
    torch.testing.assert_close(out, columns.pooled_scores_reference(attention, norms, kernel), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [("mean_attention", torch.float32), ("mean_attention", torch.bfloat16), ("mean_score", torch.float16)],
)
def test_the_score_is_the_policys(rule, dtype):
    """The kernels together, against LaProx on whole tensors in the same dtype."""
    q, k, v, slots = make(70, 8, 3, dtype=dtype)
    first, mean = 20, rule == "mean_attention"
    projections = torch.randn(2, 2, 3, 64, 64).to(DEVICE)
    factors = projections.transpose(2, 3).reshape(2, 2, 64, 3 * 64).to(dtype)
    lse = columns.window_lse(q, k, slots, 0.125)
    attention = columns.column_norms(q, k, slots, lse, first, 0.125, mean=mean)
    found = columns.pooled_scores(attention, projection.projected_norm(v, slots[first:], factors, mean), 7)
    visible = (70 - torch.arange(first, 70, device=DEVICE)).clamp(max=8).float()
    for layer in range(2):
        probabilities = columns.window_logits(q, k, slots, 0.125)[layer].softmax(-1).float()[..., first:]
        view = LayerView(probabilities, v[layer, slots[first:]], projections[layer], visible)
        expected = LaProx()(view, ScoreOptions(7, rule))
        torch.testing.assert_close(found[layer], expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_a_window_longer_than_its_tokens_is_refused():
    q, k, _, slots = make(5, 6)
    with pytest.raises(ValueError, match="a window of 6 queries"):
        columns.window_lse(q, k, slots, 0.125)
