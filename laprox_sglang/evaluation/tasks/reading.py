"""Real text: quote a passage of it, or read on. For the fidelity figures, which tell policies apart on small models."""

from __future__ import annotations

import random

from laprox_sglang.evaluation.items import MARK, Item, one_turn
from laprox_sglang.evaluation.tasks.source import Source

# Words of the passage that the question gives away, and of the passage that is to be quoted.
CUE, PASSAGE = 8, 40
CONTINUATION = 200


def quote(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """The question names how a passage begins; the answer is the passage, word for word as in the document."""
    prose = source.prose(draw, length)
    parts = prose.split()
    start = draw.randrange(len(parts) // 20, max(len(parts) // 20 + 1, len(parts) - CUE - PASSAGE - 20))
    cue, passage = " ".join(parts[start : start + CUE]), " ".join(parts[start : start + CUE + PASSAGE])
    question = f'\n\nQuote the passage of the text that begins with "{cue}".'
    return Item("quote", index, one_turn(f"Read this text.\n\n{prose}", question), passage, meta={"length": length})


def continuation(draw: random.Random, source: Source, length: int, index: int) -> Item:
    """No question at all: the text reads on."""
    tokens = source.tokens
    start = draw.randrange(len(tokens) - length - CONTINUATION)
    document = source.tokenizer.decode(tokens[start : start + length])
    rest = source.tokenizer.decode(tokens[start + length : start + length + CONTINUATION])
    messages = [{"role": "user", "content": document + MARK}]
    return Item("text", index, messages, rest, meta={"length": length}, plain=True)
