"""The same budget for every layer and head."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked, shares


class Head(Allocation):
    """Uniform per (layer, head), as in SnapKV (arXiv 2404.14469)."""

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        layers, heads, _ = scores.shape
        total = min(total, scores.numel())
        budgets = shares(total, layers * heads, scores.device).view(layers, heads)
        return keep_by_head(ranked(scores, protected), budgets, most=total // (layers * heads) + 1)
