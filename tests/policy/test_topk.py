from __future__ import annotations

import math

import pytest
import torch

from laprox_sglang.policy.topk import exact_topk_mask, exact_topk_mask_rows


def naive(row: torch.Tensor, k: int) -> torch.Tensor:
    values = [0.0 if math.isnan(value) else value for value in row.tolist()]
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]] = True
    return mask


def rows_of(kind: str, size: int) -> torch.Tensor:
    rows = torch.rand(4, size, generator=torch.Generator().manual_seed(size))
    if kind == "ties":
        rows = (rows * 3).floor()
    elif kind == "equal":
        rows = torch.zeros_like(rows)
    elif kind == "wild":
        rows = rows - 0.5
        wild = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42])
        rows[:, ::2] = wild.repeat(size)[: rows[:, ::2].shape[1]]
    return rows


KINDS = ["distinct", "ties", "equal", "wild"]
SIZES = [1, 63, 100]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_flat(kind, size):
    row = rows_of(kind, size)[0]
    for k in sorted({0, 1, size // 3, size // 2, size - 1, size}):
        assert torch.equal(exact_topk_mask(row, k), naive(row, k)), k
    assert exact_topk_mask(row, size + 5).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, size):
    rows = rows_of(kind, size)
    for wanted in [(0, 1, size // 2, size), (size, 0, 0, 1), (0, 0, 0, 0)]:
        expected = torch.stack([naive(row, k) for row, k in zip(rows, wanted, strict=True)])
        for most in (max(wanted), size + 3):
            assert torch.equal(exact_topk_mask_rows(rows, torch.tensor(wanted), most), expected), (wanted, most)


def test_input_is_left_alone():
    row = rows_of("wild", 63)[0]
    before = row.clone()
    exact_topk_mask(row, 20)
    torch.testing.assert_close(row, before, rtol=0, atol=0, equal_nan=True)


def test_nothing_at_all():
    assert exact_topk_mask(torch.empty(0), 0).shape == (0,)
    assert exact_topk_mask_rows(torch.empty(3, 0), torch.zeros(3, dtype=torch.int64), 1).shape == (3, 0)
