"""SnapKV: attention alone."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import attention_mean, pool


class Attention(Score):
    """Mean window attention, average-pooled, mean over the group (SnapKV, arXiv 2404.14469).

    The paper sums over the window; a mean ranks the stretch's tokens alike, and is fair to the window's own tokens,
    which fewer queries see. Linear in the attention, so both group rules agree.
    """

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        return pool(attention_mean(view).mean(dim=1), options.pool_kernel)
