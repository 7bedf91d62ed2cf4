"""Recency only; with the protected first positions this is sinks plus a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions


class Streaming(Score):
    """The newer the better, the same in every layer and head (StreamingLLM, arXiv 2309.17453).

    The sinks of that paper are the positions that the allocation is told to protect.
    """

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        heads, tokens = view.probabilities().shape[0], view.probabilities().shape[-1]
        newness = torch.arange(1, tokens + 1, device=view.probabilities().device, dtype=torch.float32) / tokens
        return newness.expand(heads, tokens)
