"""CAKE: tokens whose attention is high, or comes and goes."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import attention_mean, attention_variance, pool


class Cake(Score):
    """``mean_w A[w, t] + gamma * var_w A[w, t]``, pooled, mean over the group (CAKE's eviction indicator,
    arXiv 2503.12491).

    gamma 200 and the sample variance (divided by the count less one) are those of the authors' code. CAKE's layer
    budgets are an allocation and not part of this. The group is joined linearly, so both group rules agree.
    """

    gamma = 200.0

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        indicator = attention_mean(view) + self.gamma * attention_variance(view)
        return pool(indicator.mean(dim=1), options.pool_kernel)
