"""The contract of an allocation: scores and one total in, exactly that many entries marked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView
from laprox_sglang.policy.topk import exact_topk_mask_rows

# Scores stay below infinity, which is the rank of what must be kept before anything else.
_FINITE = torch.finfo(torch.float32).max


class Allocation(ABC):
    """How the budget is shared between layers, heads and tokens. Pure, and never waits for the device.

    normalised: whether select() divides each layer's scores by their sum first.
    weighs_layers: whether keep() needs ``weights``, one of ``layer_weight`` for each layer.
    """

    normalised: bool = False
    weighs_layers: bool = False

    def layer_weight(self, view: LayerView, stretch: int) -> Tensor:
        """[] float64, at least 0: what the window's attention to the first `stretch` tokens makes a layer worth."""
        raise NotImplementedError(f"{type(self).__name__} does not weigh layers")

    @abstractmethod
    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        """Marks exactly `total` entries, or all when there are fewer.

        scores: [L, H, n] float32, higher is kept first; NaN counts as 0, an infinity as the largest number.
        total: at least 0. protected: [n] bool, positions that every (layer, head) keeps, counted in the total; when the
        total does not reach for all of them, they come first, in the order of their positions. weights: [L] float64,
        for an allocation that weighs layers; the others do not look at it.
        Equal scores go by position, then layer, then head. A total that does not divide gives the first layers (heads)
        one more. Returns [L, H, n] bool.
        """


def ranked(scores: Tensor, protected: Tensor) -> Tensor:
    """[L, H, n] scores, infinite where protected and nowhere else; NaN is left to the top-k."""
    return scores.clamp(min=-_FINITE, max=_FINITE).masked_fill(protected, math.inf)


def shares(total: Tensor | int, parts: int, device: torch.device) -> Tensor:
    """`total` (a number, or a tensor [...]) in equal shares, the first ones one more: [..., parts] int64."""
    if isinstance(total, Tensor):
        total = total.unsqueeze(-1)
    return total // parts + (torch.arange(parts, device=device) < total % parts)


def keep_by_head(scores: Tensor, budgets: Tensor, most: int) -> Tensor:
    """The best of each (layer, head), [L, H, n] bool: scores [L, H, n], budgets [L, H] integers, none above `most`."""
    return exact_topk_mask_rows(scores.flatten(0, 1), budgets.flatten(), most).view(scores.shape)
