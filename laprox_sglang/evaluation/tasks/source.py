"""Where tasks get prose and words from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation import text


class Source:
    """Prose of a wanted number of tokens, and distinct words."""

    def __init__(self, tokenizer: Any, files: Sequence[Path]):
        self.tokenizer = tokenizer
        self.files = files

    @cached_property
    def tokens(self) -> list[int]:
        found: list[int] = []
        for each in text.texts(self.files):
            found += self.tokenizer.encode(each, add_special_tokens=False)
        return found

    def prose(self, draw: random.Random, length: int) -> str:
        """About ``length`` tokens of running text. Raises ValueError when there is not that much."""
        if length > len(self.tokens):
            raise ValueError(f"the text has {len(self.tokens)} tokens, {length} are asked for; give longer files")
        start = draw.randrange(len(self.tokens) - length + 1)
        return self.tokenizer.decode(self.tokens[start : start + length])

    def lines(self, draw: random.Random, length: int) -> list[str]:
        return [line.strip() for line in self.prose(draw, length).split("\n") if line.strip()]

    def words(self, draw: random.Random, count: int) -> list[str]:
        return draw.sample(text.words(), count)

    def count(self, some: str) -> int:
        return len(self.tokenizer.encode(some, add_special_tokens=False))

    def fill(self, make: Any, length: int, start: int) -> Any:
        """The largest ``make(n)``, a text or a pair with a text first, of at most ``length`` tokens."""
        low, high = start, 2 * start
        size = lambda n: self.count(_first(make(n)))  # noqa: E731
        while size(high) <= length:
            low, high = high, 2 * high
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= length else (low, middle)
        return make(low)


def _first(made: Any) -> str:
    return made if isinstance(made, str) else made[0]
