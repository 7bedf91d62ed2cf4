"""Rescoring: a long answer stays small while it grows, whoever else is batched."""

import math
import threading
import time

import pytest

from tests.server.harness import LAPROX, Server, cached, peak_while
from tests.server.tiny_models import tiny_model, tokens

FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--laprox-ratio", "0.2", "--chunked-prefill-size", "512")
INTERVAL, WINDOW, RATIO = 64, 32, 0.2


def bound(tokens_now: int) -> int:
    """Kept entries, the window, what has come since the last rescoring, and a slot of rounding for each time."""
    rounds = math.ceil(tokens_now / INTERVAL) + 1
    return math.ceil(RATIO * tokens_now) + WINDOW + INTERVAL + 8 + 2 * rounds


@pytest.fixture(scope="module", params=[True, False], ids=["overlap", "no-overlap"])
def server(request):
    flags = () if request.param else ("--disable-overlap-schedule",)
    with Server(tiny_model(), *LAPROX, *FLAGS, "--laprox-rescore-interval", str(INTERVAL), *flags) as running:
        yield running


def test_a_long_answer_stays_within_its_bound(server):
    """``test_serving.test_without_rescoring_a_long_answer_grows`` is the control."""
    server.flush()
    before = server.idle_slots()["rescores"]
    answers = []
    peak = peak_while(server, lambda: answers.append(server.generate(tokens(200, 1), 3000)))
    assert len(answers[0]["output_ids"]) == 3000
    assert peak <= bound(3200)
    assert server.idle_slots()["rescores"] - before >= 3000 // INTERVAL - 2
    follow = server.generate(tokens(200, 1) + answers[0]["output_ids"] + tokens(9, 2), 2)
    assert cached(follow) == 3199


def test_rescored_chats_equal_their_solo_runs(server):
    chats = [tokens(100 + 37 * index, 50 + index) for index in range(12)]
    solo = []
    for chat in chats:
        server.flush()
        solo.append(server.generate(chat, 220)["output_ids"])
    server.flush()
    before = server.idle_slots()["rescores"]
    replies = server.together(chats, 220)
    assert [reply["output_ids"] for reply in replies] == solo
    assert server.idle_slots()["rescores"] - before >= 2 * len(chats)


def test_retraction_and_aborts_while_rescoring_is_due():
    # SGLang's own switch for tests: every so many steps it retracts, whatever the pool still has.
    forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "90"}
    with Server(tiny_model(), *LAPROX, *FLAGS, "--laprox-rescore-interval", "40", tokens=900, env=forced) as server:
        replies = server.together([tokens(150 + index, 80 + index) for index in range(8)], 300)
        assert all(len(reply["output_ids"]) == 300 for reply in replies)
        assert server.laprox()["rescores"] > 8
        assert sum(reply["meta_info"].get("num_retractions", 0) for reply in replies) > 0
        threads = [
            threading.Thread(target=server.client.post, args=("/generate",), kwargs={"json": body})
            for body in [Server.body(tokens(200, 200 + index), 600) for index in range(6)]
        ]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        server.client.post("/abort_request", json={"abort_all": True})
        for thread in threads:
            thread.join()
        server.flush()
        assert server.idle_slots()["slots_free"] == 900
