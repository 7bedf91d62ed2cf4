"""A document in the first turn, other talk, and later a question about the document or about an earlier turn."""

from __future__ import annotations

import random

from laprox_sglang.evaluation.items import MARK, Item
from laprox_sglang.evaluation.tasks.needles import INTRODUCTION, _fact, _number
from laprox_sglang.evaluation.tasks.source import Source


def multi_turn(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """Even items ask about the document of turn 1, odd ones about what was said in turn 2."""
    place, key, other = source.words(draw, 3)
    code, told = _number(draw), _number(draw)
    lines = source.lines(draw, max(50, length - 40))
    lines.insert(draw.randrange(len(lines) + 1), _fact(key, code))
    later = "What is 7 + 5?", "It is 12."
    asked, value = (key, code) if index % 2 == 0 else (other, told)
    messages = [
        {"role": "user", "content": INTRODUCTION + "\n".join(lines) + MARK},
        {"role": "assistant", "content": "I have read the text."},
        {"role": "user", "content": f"By the way, I live in {place}. {_fact(other, told)} Please remember it too."},
        {"role": "assistant", "content": f"I will remember the code of {other}."},
        {"role": "user", "content": later[0]},
        {"role": "assistant", "content": later[1]},
        {"role": "user", "content": f"What is the access code of {asked}? Answer with one sentence."},
    ]
    meta = {"length": length, "about": "document" if asked == key else "turn"}
    return Item("talk", index, messages, _fact(asked, value), [value], meta=meta)
