"""Head budgets that were measured once for a model and are read from a file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from laprox_sglang.policy.allocations.base import Allocation, keep_by_head, ranked
from laprox_sglang.policy.allocations.proportional import proportional_shares


class ProfileError(ValueError):
    """The profile cannot be used; the message says why and how to make one."""


class Profile(Allocation):
    """Each head has a base budget, and a share of the rest by its measured importance (HeadKV, arXiv 2410.19258).

    shares: [L, H] float, at least 0, the importance of each head; only proportions count. The base is 1 - 1/beta of the
    uniform budget, with beta 1.2 as in the paper's main results. Protected positions are taken out of the budget first.
    ``laprox-sglang profile`` makes the file.
    """

    beta = 1.2

    def __init__(self, shares: Tensor):
        if shares.dim() != 2 or not bool(torch.isfinite(shares).all()) or bool((shares < 0).any()):
            raise ProfileError("a profile needs [layers][heads] finite numbers that are at least 0")
        self.shares = shares.double()

    def keep(self, scores: Tensor, total: int, protected: Tensor, weights: Tensor | None = None) -> Tensor:
        layers, heads, tokens = scores.shape
        if tuple(self.shares.shape) != (layers, heads):
            raise ProfileError(
                f"the profile is for {self.shares.shape[0]} layers of {self.shares.shape[1]} KV heads, the model has "
                f"{layers} of {heads}; make one for this model with `laprox-sglang profile`"
            )
        if self.shares.device != scores.device:  # once: a copy from main memory may wait
            self.shares = self.shares.to(scores.device)
        total = min(total, scores.numel())
        count = protected.sum()
        fixed = (count * (layers * heads)).clamp(max=total)
        importance = self.shares.flatten()
        importance = importance / importance.sum().clamp(min=1e-300)
        mixed = (1 - 1 / self.beta) / (layers * heads) + importance / self.beta
        by_head = proportional_shares(total - fixed, mixed, tokens - count)
        # What the protected positions take: all of them, or, where the total is too small, the first lists one more.
        lists = torch.arange(layers * heads, device=scores.device)
        budgets = by_head + fixed // (layers * heads) + (lists < fixed % (layers * heads))
        return keep_by_head(ranked(scores, protected), budgets.view(layers, heads), tokens)


def read_profile(path: str | Path) -> Tensor:
    """The ``shares`` of a profile file, ``[L, H]``. Raises ProfileError."""
    remedy = "make one with `laprox-sglang profile --model-path MODEL --output FILE`"
    try:
        shares = json.loads(Path(path).read_text())["shares"]
        return torch.tensor(shares, dtype=torch.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfileError(f"{path} is not a profile ({type(error).__name__}: {error}); {remedy}") from None
