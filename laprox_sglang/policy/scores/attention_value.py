"""Attention times the value's own length: LaProx without the output projection."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import attention_norm, pool


class AttentionValue(Score):
    """``||A[:, t]||_2 * ||v_t||_2``, pooled as LaProx is: the ablation of its projection (arXiv 2605.07234).

    The value is the same for the whole group, so both group rules agree.
    """

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        attention = pool(attention_norm(view).mean(dim=1), options.pool_kernel)
        return attention * view.values.float().norm(dim=-1).transpose(0, 1)
