"""From the scores of all layers to the entries that are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked
from laprox_sglang.policy.normalise import layer_normalise


@dataclass(frozen=True)
class Selection:
    """The kept entries of a stretch, in lists per (layer, kv head).

    positions: [R] int32, token index within the stretch, ordered by (layer, head, position).
    indptr: [L*H + 1] int32; the entries of list i = layer * H + head are positions[indptr[i]:indptr[i + 1]].
    Both lie on the device of the scores; R is known on the host.
    """

    positions: Tensor
    indptr: Tensor


# The part of each head's budget that the first of two stages fills (alpha of CriticalKV, arXiv 2502.03805).
FIRST_STAGE = 0.5


def select(
    scores: Tensor,
    total: int,
    allocation: Allocation,
    protected: Tensor,
    stretch: int,
    *,
    first: Tensor | None = None,
    weights: Tensor | None = None,
) -> Selection:
    """Keeps exactly R = min(total, L * H * stretch) entries of the stretch, without waiting for the device.

    scores: [L, H, n] float32, at least 0, of the stretch's tokens and of the window's behind it (n >= stretch).
    protected: [n] bool, positions that every (layer, head) keeps first. Layer normalisation sums over all n tokens;
    only the first `stretch` of them are candidates. first: [L, H, n] float32, for a score with two stages (see
    ``Score.first_stage``). weights: [L] float64, for an allocation that weighs layers. Raises ValueError for sizes that
    do not fit.
    """
    layers, heads, tokens = scores.shape
    if total < 0 or not 0 <= stretch <= tokens or protected.shape != (tokens,):
        raise ValueError(
            f"cannot keep {total} entries of a stretch of {stretch} tokens: scores cover {tokens} tokens and protected "
            f"has shape {tuple(protected.shape)}"
        )
    candidates, guarded = scores[:, :, :stretch], protected[:stretch]
    if first is None:
        mask = allocation.keep(_comparable(scores, allocation)[:, :, :stretch], total, guarded, weights)
    else:
        first = _comparable(first, allocation)[:, :, :stretch]
        budgets = allocation.keep(first, total, guarded, weights).sum(dim=-1)
        half = keep_by_head(ranked(first, guarded), (budgets * FIRST_STAGE).long(), stretch)
        mask = keep_by_head(ranked(candidates, guarded).masked_fill(half, math.inf), budgets, stretch)
    count = mask.flatten().cumsum(0, dtype=torch.int32)
    indptr = torch.zeros(layers * heads + 1, dtype=torch.int32, device=scores.device)
    if stretch == 0:
        return Selection(torch.empty(0, dtype=torch.int32, device=scores.device), indptr)
    indptr[1:] = count[stretch - 1 :: stretch]
    # entry r is where the running count first reaches r + 1: of a size known here, unlike torch.nonzero
    kept = min(total, layers * heads * stretch)
    entries = torch.searchsorted(count, torch.arange(1, kept + 1, dtype=torch.int32, device=scores.device))
    return Selection((entries % stretch).to(torch.int32), indptr)


def _comparable(scores: Tensor, allocation: Allocation) -> Tensor:
    return layer_normalise(scores) if allocation.normalised else scores
