"""More for the first layers, less for the last."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked, shares

BETA = 20


class Pyramid(Allocation):
    """Layer budgets that fall arithmetically, uniform over a layer's heads (PyramidKV, arXiv 2406.02069).

    Of what is left after the protected positions, the last layer gets 1/beta of the mean and the first one twice the
    mean less that; where the first would get more than it holds, the slope is flatter. BETA 20 is that of the authors'
    code.
    """

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        heads = scores.shape[1]
        by_layer, most = pyramid_budgets(scores, min(total, scores.numel()), protected)
        budgets = shares(by_layer, heads, scores.device)
        return keep_by_head(ranked(scores, protected), budgets, most // heads + 1)


def pyramid_budgets(scores: Tensor, total: int, protected: Tensor) -> tuple[Tensor, int]:
    """[L] int64 budgets of the layers of `scores` [L, H, n], their sum `total`, and a bound on them for the host."""
    layers, heads, tokens = scores.shape
    count = protected.sum()
    fixed = (count * (layers * heads)).clamp(max=total)
    slope = arithmetic_shares(total - fixed, layers, (tokens - count) * heads, BETA)
    # the first layer has at most twice the mean; one more for each of the two roundings
    return shares(fixed, layers, scores.device) + slope, 2 * total // layers + 2


def arithmetic_shares(total: Tensor, layers: int, room: Tensor, beta: int) -> Tensor:
    """[layers] int64 that fall (nearly) evenly from first to last, none above `room`, their sum exactly `total`.

    total: int64, at most layers * room. room: int64, what one layer can take. All in integers, as rounding must not
    lose an entry: shares are differences of a running sum, in units of 1 / (layers * beta).
    """
    if layers == 1:
        return total.view(1)
    first = torch.minimum(total * (2 * beta - 1), room * (layers * beta))
    last = 2 * beta * total - first
    k = torch.arange(layers + 1, device=total.device)
    running = (2 * (layers - 1) * k * first - (first - last) * k * (k - 1)) // (2 * (layers - 1) * layers * beta)
    # rounding may leave a later layer one more than an earlier one
    return running.diff().sort(descending=True).values
