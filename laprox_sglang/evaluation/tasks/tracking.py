"""A value that is handed from variable to variable, among prose (RULER's variable tracking)."""

from __future__ import annotations

import random
import string
from itertools import pairwise

from laprox_sglang.evaluation.items import Item, one_turn
from laprox_sglang.evaluation.tasks.source import Source

HOPS = 4


def variables(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """Two chains of assignments in the right order; asked are the variables of one."""
    names = ["".join(draw.choices(string.ascii_uppercase, k=5)) for _ in range(2 * (HOPS + 1))]
    chains = [names[: HOPS + 1], names[HOPS + 1 :]]
    values = [str(draw.randrange(10_000, 100_000)) for _ in chains]
    introduction = "Keep track of the variables that are assigned in the following text.\n\n"
    lines = source.lines(draw, max(50, length - 120))
    marked: list[tuple[int, str]] = []
    for chain, value in zip(chains, values, strict=True):
        steps = [f"VAR {chain[0]} = {value}"]
        steps += [f"VAR {name} = VAR {before}" for before, name in pairwise(chain)]
        places = sorted(draw.randrange(len(lines) + 1) for _ in steps)
        marked += list(zip(places, steps, strict=True))
    for place, step in sorted(marked, key=lambda pair: pair[0], reverse=True):
        lines.insert(place, step)
    question = f"\n\nWhich variables have the value {values[0]} in the end? Answer with one sentence that names all."
    answer = f"The variables with the value {values[0]} are {', '.join(chains[0])}."
    messages = one_turn(introduction + "\n".join(lines), question)
    return Item("tracking", index, messages, answer, chains[0], 64, meta={"length": length})
