"""Facts hidden in prose: one, one of several, several values of one key, several at once (RULER's NIAH family)."""

from __future__ import annotations

import random

from laprox_sglang.evaluation.items import Item, one_turn
from laprox_sglang.evaluation.tasks.source import Source

DEPTHS = 5
INTRODUCTION = "Some access codes are hidden in the following text. Remember them.\n\n"


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1_000_000, 10_000_000))


def _fact(key: str, value: str) -> str:
    return f"The access code of {key} is {value}."


def _hide(draw: random.Random, source: Source, length: int, facts: list[str], depth: float | None = None) -> str:
    """The facts as lines of their own among ``length`` tokens of prose, at a depth from 0 to 1 or anywhere."""
    lines = source.lines(draw, max(50, length - source.count("\n".join([INTRODUCTION, *facts]))))
    for fact in facts:
        place = draw.random() if depth is None else depth
        lines.insert(round(place * len(lines)), fact)
    return INTRODUCTION + "\n".join(lines)


def single(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """One needle; depths in turn, from the beginning to the end."""
    key, value, depth = source.words(draw, 1)[0], _number(draw), (index % DEPTHS) / (DEPTHS - 1)
    document = _hide(draw, source, length, [_fact(key, value)], depth)
    question = f"\n\nWhat is the access code of {key}? Answer with one sentence."
    return Item(
        "needle",
        index,
        one_turn(document, question),
        _fact(key, value),
        [value],
        meta={"depth": depth, "length": length},
    )


def multi_key(draw: random.Random, source: Source, length: int, index: int) -> Item:
    keys = source.words(draw, 4)
    values = [_number(draw) for _ in keys]
    document = _hide(draw, source, length, [_fact(*pair) for pair in zip(keys, values, strict=True)])
    question = f"\n\nWhat is the access code of {keys[0]}? Answer with one sentence."
    answer = _fact(keys[0], values[0])
    return Item("multikey", index, one_turn(document, question), answer, [values[0]], meta={"length": length})


def multi_value(draw: random.Random, source: Source, length: int, index: int) -> Item:
    key = source.words(draw, 1)[0]
    values = [_number(draw) for _ in range(4)]
    document = _hide(draw, source, length, [_fact(key, value) for value in values])
    question = f"\n\nWhat are all the access codes of {key}? Answer with one sentence that names every one."
    answer = f"The access codes of {key} are {', '.join(values)}."
    return Item("multivalue", index, one_turn(document, question), answer, values, 64, meta={"length": length})


def multi_query(draw: random.Random, source: Source, length: int, index: int) -> Item:
    keys = source.words(draw, 4)
    values = [_number(draw) for _ in keys]
    facts = [_fact(*pair) for pair in zip(keys, values, strict=True)]
    document = _hide(draw, source, length, facts)
    question = f"\n\nWhat are the access codes of {', '.join(keys)}? Answer with one sentence for each."
    return Item("multiquery", index, one_turn(document, question), " ".join(facts), values, 96, meta={"length": length})
