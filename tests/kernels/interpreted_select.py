"""The selection kernel against its reference and against the policy's own path: the same bits."""

import math

import pytest
import torch
from interpreted import DEVICE
from interpreted import pytestmark as pytestmark

from laprox_sglang.kernels import select as selection
from laprox_sglang.policy.allocations.model import ModelRaw
from laprox_sglang.policy.select import select as policy_select


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 64)
    monkeypatch.setattr(selection, "SPAN", 64)


def check(scores, total, protected):
    scores, protected = scores.to(DEVICE), protected.to(DEVICE)
    found = selection.select(scores, total, protected)
    policys = policy_select(scores, total, ModelRaw(), protected, scores.shape[2])
    for expected in (selection.select_reference(scores, total, protected), (policys.positions, policys.indptr)):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def none_protected(n):
    return torch.zeros(n, dtype=torch.bool)


@pytest.mark.parametrize(
    ("layers", "heads", "n", "share"),
    [(1, 1, 1, 1.0), (2, 3, 63, 0.05), (1, 2, 100, 0.5), (3, 1, 33, 0.0), (3, 1, 33, 0.5), (3, 1, 33, 1.0)],
)
def test_sizes(layers, heads, n, share):
    torch.manual_seed(n)
    check(torch.rand(layers, heads, n), round(share * layers * heads * n), none_protected(n))


def test_many_blocks(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 128)
    monkeypatch.setattr(selection, "SPAN", 512)
    torch.manual_seed(0)
    check(torch.rand(1, 1, 2000), 100, none_protected(2000))


@pytest.mark.parametrize(("values", "total"), [(1, 1), (1, 20), (1, 161), (2, 7), (5, 50)])
def test_ties(values, total):
    """Few different scores: which of the equal ones are kept is decided by position, layer, head."""
    torch.manual_seed(values)
    check(torch.randint(values, (3, 2, 27)).float() / 8, total, none_protected(27))


@pytest.mark.parametrize("total", [5, 12, 70])
def test_protected_positions_come_first(total):
    torch.manual_seed(total)
    protected = none_protected(40)
    protected[[0, 1, 17]] = True
    check(torch.rand(2, 2, 40), total, protected)


def test_unusual_numbers():
    """Negative, tiny, huge, infinite, both zeros, NaN."""
    scores = torch.tensor([0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, 3e38, -3e38, math.nan, 1.0, -1.0, 1e-30])
    scores = torch.stack([scores, scores.flip(0)])[None]
    for total in (1, 7, 12, 20, 23):
        check(scores, total, none_protected(12))


def test_scores_that_differ_in_the_last_bit():
    base = torch.tensor(0.3).view(torch.int32)
    scores = (base + torch.randperm(200, dtype=torch.int32)).view(torch.float32).view(2, 2, 50)
    check(scores, 77, none_protected(50))


def test_strided_scores():
    """As in use: the stretch's part of scores that go on over the window."""
    torch.manual_seed(1)
    whole = torch.rand(2, 2, 70)
    scores, protected = whole[..., :45].to(DEVICE), none_protected(45).to(DEVICE)
    assert not scores.is_contiguous() or DEVICE != "cpu"
    for mine, theirs in zip(
        selection.select(whole.to(DEVICE)[..., :45], 60, protected),
        selection.select_reference(scores, 60, protected),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


def test_refusals():
    scores = torch.rand(2, 2, 10, device=DEVICE)
    with pytest.raises(ValueError, match="cannot keep -1"):
        selection.select(scores, -1, none_protected(10))
    with pytest.raises(ValueError, match="strides"):
        selection.select(scores.transpose(1, 2), 5, none_protected(2))
