"""A configuration file of many settings; one of them is asked for. Values take several tokens."""

from __future__ import annotations

import random

from laprox_sglang.evaluation.items import Item, one_turn
from laprox_sglang.evaluation.tasks.source import Source


def settings(draw: random.Random, source: Source, length: int, index: int) -> Item:
    words = source.words(draw, 1500)

    def make(count: int) -> tuple[str, list[tuple[str, str]]]:
        inner = random.Random(words[0])
        pairs = [
            (f"{words[3 * i]}.{words[3 * i + 1]}", f"{words[3 * i + 2]}-{inner.randrange(100, 1000)}")
            for i in range(min(count, len(words) // 3))
        ]
        listed = "\n".join(f"{key} = {value}" for key, value in pairs)
        return f"This is the configuration of a machine.\n\n{listed}", pairs

    document, pairs = source.fill(make, min(length, source.count(make(len(words) // 3)[0]) - 1), 10)
    key, value = draw.choice(pairs)
    question = f"\n\nWhat is the setting {key} in the configuration? Answer with one sentence."
    answer = f"The setting {key} is {value}."
    return Item("lookup", index, one_turn(document, question), answer, [value], meta={"length": length})
