"""One top-k over all layers, heads and tokens."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, ranked
from laprox_sglang.policy.topk import exact_topk_mask


class Model(Allocation):
    """Model-wide top-k of layer-normalised scores (LaProx, arXiv 2605.07234)."""

    normalised = True

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        layers, heads, tokens = scores.shape
        # position-major, so that the lower index among equals is the earlier position, then layer, then head
        flat = ranked(scores, protected).permute(2, 0, 1).flatten()
        return exact_topk_mask(flat, total).view(tokens, layers, heads).permute(1, 2, 0)


class ModelRaw(Model):
    """The same without normalisation: the layers with the largest values win (the paper's ablation)."""

    normalised = False
