"""Layer budgets from what the window's attention looks like: spread out and changing layers get more."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked, shares
from laprox_sglang.policy.allocations.proportional import proportional_shares
from laprox_sglang.policy.scores.base import LayerView
from laprox_sglang.policy.scores.parts import attention_variance


class Cake(Allocation):
    """Layers in proportion to ``entropy^(1/tau1) * variance^(1/tau2)``, uniform over a layer's heads (CAKE,
    arXiv 2503.12491).

    entropy: of the window's attention to the stretch, summed over queries, heads and tokens. variance: over the
    window's queries (sample variance), summed over heads and tokens. tau1 1.6 and tau2 0.6 as in the code of
    DefensiveKV's authors, who compare with it; CAKE's own runs choose them for each model. The budget that a full layer
    cannot take goes to the others in proportion, where CAKE's code gives it in equal parts. Protected positions are
    taken out of the budget first, in equal parts.
    """

    tau1, tau2 = 1.6, 0.6
    weighs_layers = True

    def layer_weight(self, view: LayerView, stretch: int) -> Tensor:
        attention = view.probabilities()[..., :stretch]
        # xlogy is 0 at 0, where the logarithm alone is not finite.
        entropy = -torch.xlogy(attention, attention).sum()
        variance = attention_variance(view)[..., :stretch].sum()
        return (entropy.clamp(min=0).double() ** (1 / self.tau1)) * (variance.double() ** (1 / self.tau2))

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            raise ValueError(
                "the allocation 'cake' needs each layer's weight; give select() what layer_weight() returns"
            )
        layers, heads, tokens = scores.shape
        total = min(total, scores.numel())
        count = protected.sum()
        fixed = (count * (layers * heads)).clamp(max=total)
        by_layer = proportional_shares(total - fixed, weights, (tokens - count) * heads)
        budgets = shares(shares(fixed, layers, scores.device) + by_layer, heads, scores.device)
        return keep_by_head(ranked(scores, protected), budgets, tokens)
