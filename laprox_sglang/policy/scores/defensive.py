"""DefensiveKV: guard against the query that needs a token most, rather than the average one."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import output_l1_norms, pool


class Defensive(Score):
    """``max(max_w a[w, t], mean_t max_w a[w, t]) * share_t`` (DefensiveKV, arXiv 2510.13334).

    a: each query's attention, average-pooled and scaled back to its sum. The inner maximum over the window and the
    group is the worst case; the floor at its mean over the tokens is the prior risk of a token that this window does
    not look at. share_t: the head's part of ``||v_t W_O||_1`` over the layer's heads. The paper's choice of constants
    and the share are those of the authors' code. That code also puts first, CriticalKV's way, the tokens which carry
    90% of the mean attention; that is a selection and left out here. The mean runs over all tokens given. The group is
    joined by the maximum, so options.gqa has no effect.
    """

    reads_output = True

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        attention = view.probabilities()
        pooled = pool(attention, options.pool_kernel)
        total = pooled.sum(dim=-1, keepdim=True)
        pooled = pooled * (attention.sum(dim=-1, keepdim=True) / total.masked_fill(total == 0, 1.0))
        worst = pooled.amax(dim=(1, 2))
        risk = worst.clamp(min=worst.mean(dim=-1, keepdim=True))
        norms = output_l1_norms(view)
        total = norms.sum(dim=0, keepdim=True)
        return risk * norms / total.masked_fill(total == 0, 1.0)
