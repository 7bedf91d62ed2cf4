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


def get_allocation(name: str) -> Allocation:
    return _make("allocations", *_look_up("allocation", _ALLOCATIONS, name))


def _look_up(kind: str, known: Mapping[str, tuple[str, str]], name: str) -> tuple[str, str]:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
    return known[name]


def _make(package: str, module: str, class_name: str) -> Any:
    return getattr(importlib.import_module(f"laprox_sglang.policy.{package}.{module}"), class_name)()
