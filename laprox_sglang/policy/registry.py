"""The names of the scores and allocations, and their classes, imported on first use.

Imports no torch: the settings are checked against these names before anything heavy is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laprox_sglang.policy.allocations.base import Allocation
    from laprox_sglang.policy.scores.base import Score

# name -> (module below scores/ or allocations/, class)
_SCORES = {
    "laprox": ("laprox", "LaProx"),
    "attention": ("attention", "Attention"),
    "attention_value": ("attention_value", "AttentionValue"),
    "critical": ("critical", "Critical"),
    "defensive": ("defensive", "Defensive"),
    "h2o": ("h2o", "H2O"),
    "cake": ("cake", "Cake"),
    "streaming": ("streaming", "Streaming"),
    "random": ("random", "Random"),
}
_ALLOCATIONS = {
    "model": ("model", "Model"),
    "model_raw": ("model", "ModelRaw"),
    "layer": ("layer", "Layer"),
    "head": ("head", "Head"),
    "pyramid": ("pyramid", "Pyramid"),
    "layer_pyramid": ("layer", "LayerPyramid"),
    "cake": ("cake", "Cake"),
    "profile": ("profile", "Profile"),
}
# Scores that a server cannot compute, and why; the evaluation can.
NOT_SERVED = {
    "h2o": "it sums the attention of all the prompt's queries, and a server keeps those of the last window only",
}


def score_names() -> tuple[str, ...]:
    return tuple(_SCORES)


def allocation_names() -> tuple[str, ...]:
    return tuple(_ALLOCATIONS)


def check_names(score: str, allocation: str) -> None:
    """Raises ValueError, listing the known names, for an unknown score or allocation."""
    _look_up("score", _SCORES, score)
    _look_up("allocation", _ALLOCATIONS, allocation)


def get_score(name: str) -> Score:
    return _make("scores", *_look_up("score", _SCORES, name))


def get_allocation(name: str, profile: str | None = None) -> Allocation:
    """profile: the file that the allocation ``profile`` reads; no other looks at it."""
    location = _look_up("allocation", _ALLOCATIONS, name)
    if name != "profile":
        return _make("allocations", *location)
    from laprox_sglang.policy.allocations.profile import ProfileError, read_profile

    if profile is None:
        raise ProfileError("the allocation 'profile' needs a file; make one with `laprox-sglang profile`")
    return _make("allocations", *location, read_profile(profile))


def _look_up(kind: str, known: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
    return known[name]


def _make(package: str, module: str, class_name: str, *arguments: Any) -> Any:
    return getattr(importlib.import_module(f"laprox_sglang.policy.{package}.{module}"), class_name)(*arguments)
