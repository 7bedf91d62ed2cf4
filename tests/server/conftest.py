"""What stock SGLang answers, asked once for all tests that compare with it."""

from __future__ import annotations

import random

import pytest

from tests.server.harness import STOCK, Server
from tests.server.tiny_models import tiny_model, tokens

EXACT_FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--chunked-prefill-size", "8192")
CONVERSATIONS, NEW = 20, 12
SHORT_LENGTHS = range(1, 35)


def conversations() -> list[list[list[int]]]:
    """For each conversation the new tokens of each of three turns; first turns of 5 to 4,000 tokens."""
    draw = random.Random(3)
    lengths = [5, 33, 64, 127, 128, 4000, 3000] + [draw.randint(100, 1500) for _ in range(CONVERSATIONS - 7)]
    return [
        [tokens(length, 100 * index)] + [tokens(draw.randint(3, 200), 100 * index + turn) for turn in (1, 2)]
        for index, length in enumerate(lengths)
    ]


def play(server: Server) -> list[list[int]]:
    """Every conversation's output tokens, turn by turn: cold, then each last turn again on the warm cache."""
    outputs = []
    for turns in conversations():
        history: list[int] = []
        for new in turns:
            history += new
            reply = server.generate(history, NEW)
            outputs.append(reply["output_ids"])
            history += reply["output_ids"]
        outputs.append(server.generate(history[:-NEW], NEW)["output_ids"])
    return outputs


def short_prompts() -> list[list[int]]:
    return [tokens(length, 2000 + length) for length in SHORT_LENGTHS]


@pytest.fixture(scope="session")
def stock() -> dict[str, list[list[int]]]:
    with Server(tiny_model(), *STOCK, *EXACT_FLAGS) as server:
        return {
            "conversations": play(server),
            "short": [server.generate(prompt, NEW)["output_ids"] for prompt in short_prompts()],
        }
