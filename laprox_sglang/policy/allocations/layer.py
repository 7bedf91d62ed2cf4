"""The same budget for every layer, shared freely between its heads."""

from __future__ import annotations

import math

from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked, shares
from laprox_sglang.policy.allocations.pyramid import pyramid_budgets
from laprox_sglang.policy.topk import exact_topk_mask_rows


class Layer(Allocation):
    """Top-k over a layer's flattened heads, with a floor for each head (Ada-KV, arXiv 2407.11550).

    alpha: safeguard, the part of its uniform share that a head keeps in any case, rounded down. As in NVIDIA's kvpress
    it is a lower bound; the authors' code gives it to every head in advance and shares out only the rest.
    """

    alpha = 0.2

    def budgets(self, scores: Tensor, total: int, protected: Tensor) -> tuple[Tensor, int]:
        """[L] int64 with the sum `total`, and a bound on them that is known on the host."""
        return shares(total, scores.shape[0], scores.device), total // scores.shape[0] + 1

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        layers, heads, tokens = scores.shape
        total = min(total, scores.numel())
        budgets, most = self.budgets(scores, total, protected)
        scores = ranked(scores, protected)
        # the floor ranks like the protected positions; it fits beside them, as both lie within the uniform share
        floor = (shares(budgets, heads, scores.device).double() * self.alpha).long()
        safe = keep_by_head(scores, floor, most=int((most // heads + 1) * self.alpha))
        flat = scores.masked_fill(safe, math.inf).transpose(1, 2).flatten(1)
        kept = exact_topk_mask_rows(flat, budgets, most)
        return kept.view(layers, tokens, heads).transpose(1, 2)


class LayerPyramid(Layer):
    """PyramidKV's layer budgets, each shared freely between the layer's heads (Ada-Pyramid, arXiv 2407.11550)."""

    def budgets(self, scores: Tensor, total: int, protected: Tensor) -> tuple[Tensor, int]:
        return pyramid_budgets(scores, total, protected)
