"""What is compared: settings of the policy at a budget, under a name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Everything is kept, through the same kernels as the compressed copies: what the others are compared with.
FULL = "full"


@dataclass(frozen=True)
class Variant:
    """One policy at one budget. ``settings`` are ``LaProxConfig`` settings without the budget.

    ratio: share of the compressed tokens' entries that is held, window and sinks included.
    """

    name: str
    ratio: float
    settings: dict[str, Any] = field(hash=False, default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}@{self.ratio:g}"


def full() -> Variant:
    return Variant(FULL, 1.0, {"policy": "laprox"})


def of_policies(names: Iterable[str], ratios: Sequence[float], profile: str | None) -> list[Variant]:
    """Presets by name. ``headkv`` is left out without a profile."""
    found = []
    for name in names:
        settings: dict[str, Any] = {"policy": name}
        if name == "headkv":
            if profile is None:
                continue
            settings["profile"] = profile
        found += [Variant(name, ratio, settings) for ratio in ratios]
    return found


def of_grid(
    scores: Sequence[str], allocations: Sequence[str], pool_kernels: Sequence[int], ratios: Sequence[float]
) -> list[Variant]:
    """Every score with every allocation and pooling width; window and sinks are the defaults'."""
    found = []
    for score, allocation, kernel in itertools.product(scores, allocations, pool_kernels):
        settings = {"score": score, "allocation": allocation, "pool_kernel": kernel}
        found += [Variant(f"{score}/{allocation}/{kernel}", ratio, settings) for ratio in ratios]
    return found
