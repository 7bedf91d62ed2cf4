"""Ratio 1 drops nothing: greedy output equals stock SGLang's, on a cold cache and on a warm one."""

import os
import random

import pytest

from tests.server.harness import LAPROX, STOCK, Server
from tests.server.tiny_models import tiny_model, tokens

FULL = os.environ.get("LAPROX_TEST_FULL") == "1"
CONVERSATIONS, TURNS, NEW = 20, 3, 12
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--chunked-prefill-size", "8192")


def conversations() -> list[list[list[int]]]:
    """For each conversation the new tokens of each turn; first turns of 5 to 4,000 tokens."""
    draw = random.Random(3)
    lengths = [5, 33, 64, 127, 128, 4000, 3000] + [draw.randint(100, 1500) for _ in range(CONVERSATIONS - 7)]
    return [
        [tokens(length, 100 * index)] + [tokens(draw.randint(3, 200), 100 * index + turn) for turn in (1, 2)]
        for index, length in enumerate(lengths)
    ]


def run(server: Server) -> list:
    """Every conversation's output tokens, turn by turn: cold, then the last turns again on the warm cache."""
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


@pytest.fixture(scope="module")
def stock() -> list:
    with Server(tiny_model(), *STOCK, *FLAGS) as server:
        return run(server)


@pytest.mark.parametrize("overlap", [True, False])
def test_ratio_one_equals_stock(stock, overlap):
    flags = () if overlap else ("--disable-overlap-schedule",)
    with Server(tiny_model(), *LAPROX, *FLAGS, "--laprox-ratio", "1", *flags) as server:
        ours = run(server)
        state = server.laprox()
    assert state["compressions"] > CONVERSATIONS and state["segments"] > 0
    assert state["entries_dropped"] == 0
    assert ours == stock
