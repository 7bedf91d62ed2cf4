"""Exact top-k as a mask: the k largest, ties to the lower index, the same set on every device.

The k-th value is found without sorting everything, all above it are taken, and the ties at it are filled in order by a
running count. Nothing here waits for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def exact_topk_mask(scores: Tensor, k: int) -> Tensor:
    """Marks the k largest of `scores` [M] float; of equal scores the lower index goes first, NaN counts as 0.

    Returns [M] bool with exactly min(k, M) True. M must be below 2^31.
    """
    count = scores.shape[0]
    if k >= count:
        return torch.ones_like(scores, dtype=torch.bool)
    if k <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = without_nan(scores)
    threshold = scores.topk(k, sorted=False).values.amin()
    return _fill(scores, threshold, k)


def exact_topk_mask_rows(scores: Tensor, k: Tensor, most: int) -> Tensor:
    """`exact_topk_mask` of every row with a k of its own: scores [R, M] float, k [R] integer tensor, 0 <= k <= M.

    most: a bound that no row's k exceeds, known on the host, so that only that many are ordered.
    Returns [R, M] bool with exactly k[r] True in row r.
    """
    most = min(most, scores.shape[1])
    if most <= 0 or scores.shape[0] == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = without_nan(scores)
    k = k.to(torch.int64).unsqueeze(1)
    largest = scores.topk(most, dim=1).values
    # a row with k = 0 gets the largest value as its threshold, and no ties to take
    return _fill(scores, largest.gather(1, (k - 1).clamp(min=0)), k)


def without_nan(scores: Tensor) -> Tensor:
    # neither this nor masked_fill copies a number to the device, as torch.where would, which waits for it
    return torch.nan_to_num(scores, nan=0.0, posinf=math.inf, neginf=-math.inf)


def _fill(scores: Tensor, threshold: Tensor, k: Tensor | int) -> Tensor:
    """All above the threshold, and of those at it the first ones, up to k along the last dimension."""
    above = scores > threshold
    ties = scores == threshold
    missing = k - above.sum(dim=-1, keepdim=True)
    return above | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= missing))
