"""Generated tasks, after RULER's definitions (arXiv 2404.06654), and two on real text.

A task is a function ``(draw, source, length, index) -> Item``: ``draw`` a seeded random generator, ``length`` the
document's tokens. ``TASKS`` names them. A new one is a function in one of these files and a line here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation.items import Item
from laprox_sglang.evaluation.tasks import lookup, needles, reading, talk, tracking, wordlists
from laprox_sglang.evaluation.tasks.source import Source

Task = Callable[[random.Random, Source, int, int], Item]

TASKS: dict[str, Task] = {
    "needle": needles.single,
    "multikey": needles.multi_key,
    "multivalue": needles.multi_value,
    "multiquery": needles.multi_query,
    "tracking": tracking.variables,
    "common": wordlists.common,
    "frequent": wordlists.frequent,
    "lookup": lookup.settings,
    "talk": talk.multi_turn,
    "quote": reading.quote,
    "text": reading.continuation,
}


def generate(
    task: str, tokenizer: Any, lengths: list[int], count: int, seed: int, files: list[Path] | None = None
) -> list[Item]:
    """``count`` items, the lengths in turn. The same arguments give the same items. Raises ValueError."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    source = Source(tokenizer, files or [])
    items = []
    for index in range(count):
        draw = random.Random(f"{seed}/{task}/{index}")
        items.append(TASKS[task](draw, source, lengths[index % len(lengths)], index))
    return items
