"""Counting words over the whole document (RULER's common and frequent words extraction)."""

from __future__ import annotations

import random

from laprox_sglang.evaluation.items import Item, one_turn
from laprox_sglang.evaluation.tasks.source import Source


def common(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """Five words come 20 times, the others twice."""
    pool = source.words(draw, 1200)
    often, rare = pool[:5], pool[5:]
    order = draw.random()

    def make(count: int) -> str:
        listed = often * 20 + rare[:count] * 2
        random.Random(order).shuffle(listed)
        numbered = " ".join(f"{place}. {word}" for place, word in enumerate(listed, 1))
        return f"Some words come much more often than others in the following list. Remember them.\n\n{numbered}"

    document = source.fill(make, length, 2)
    question = "\n\nWhich are the 5 most common words in the list? Answer with one sentence."
    answer = f"The 5 most common words are {', '.join(often)}."
    return Item("common", index, one_turn(document, question), answer, often, 48, meta={"length": length})


def frequent(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """Made-up words, the k-th most frequent in proportion to 1 / k^2; asked are the first three."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    coined = ["".join(draw.choices(alphabet, k=6)) for _ in range(400)]
    order = draw.random()

    def make(count: int) -> str:
        listed = [
            word for rank, word in enumerate(coined[:count], 1) for _ in range(max(1, round(3 * count / rank**2)))
        ]
        random.Random(order).shuffle(listed)
        return f"Find out which words come most often in the following text.\n\n{' '.join(listed)}"

    document = source.fill(make, length, 10)
    question = "\n\nWhich are the 3 most frequent words in the text? Answer with one sentence."
    answer = f"The 3 most frequent words are {', '.join(coined[:3])}."
    return Item("frequent", index, one_turn(document, question), answer, coined[:3], 48, meta={"length": length})
