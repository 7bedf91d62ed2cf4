"""CriticalKV: attention first, then attention times what the value adds to the output."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.attention import Attention
from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import output_l1_norms


class Critical(Score):
    """``(a_t + epsilon) * ||v_t W_O||_1`` behind a first stage by ``a_t``, SnapKV's attention (CriticalKV,
    arXiv 2502.03805, algorithm 1).

    The first stage fills half of each head's budget (alpha 0.5). epsilon 1e-4 and the mean of the norms over the
    group are those of NVIDIA's kvpress. The norm is joined by its own mean, so both group rules agree.
    """

    reads_output = True
    epsilon = 1e-4

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        return (self.first_stage(view, options) + self.epsilon) * output_l1_norms(view)

    def first_stage(self, view: LayerView, options: ScoreOptions) -> Tensor:
        return Attention()(view, options)
