"""Negative control: what any score must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions

_MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Random(Score):
    """A number in (0, 1] hashed from seed, head and position: the same on every device, and in every layer.

    seed: below 2^31.
    """

    seed: int = 0

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        heads, tokens, device = (
            view.probabilities().shape[0],
            view.probabilities().shape[-1],
            view.probabilities().device,
        )
        position = torch.arange(tokens, device=device)
        head = torch.arange(heads, device=device).unsqueeze(1)
        bits = _mix(_mix(_mix(head + self.seed * 65_537) ^ position) ^ self.seed)
        # the upper 24 bits are exact in float32
        return ((bits >> 8) + 1).float() / 2**24


def _mix(x: Tensor) -> Tensor:
    """Mixes the lower 32 bits of int64 numbers; the multipliers are below 2^31, so no product overflows."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x5BD1E995) & _MASK
    return x ^ (x >> 16)
