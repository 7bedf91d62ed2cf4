"""Ratio 1 drops nothing: greedy output equals stock SGLang's, on a cold cache and on a warm one."""

import pytest

from tests.server.conftest import CONVERSATIONS, EXACT_FLAGS, play
from tests.server.harness import LAPROX, Server
from tests.server.tiny_models import tiny_model


@pytest.mark.parametrize("overlap", [True, False])
def test_ratio_one_equals_stock(stock, overlap):
    flags = () if overlap else ("--disable-overlap-schedule",)
    with Server(tiny_model(), *LAPROX, *EXACT_FLAGS, "--laprox-ratio", "1", *flags) as server:
        ours = play(server)
        state = server.laprox()
    assert state["compressions"] > CONVERSATIONS and state["segments"] > 0
    assert state["entries_dropped"] == 0
    assert ours == stock["conversations"]
