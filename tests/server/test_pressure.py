"""A pool that is too small, requests that are given up: no leak (strict check), nobody else is harmed."""

import random
import threading

import httpx
import pytest

from tests.server.harness import LAPROX, Server
from tests.server.tiny_models import tiny_model, tokens

FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--laprox-ratio", "0.2", "--chunked-prefill-size", "256")


@pytest.fixture(scope="module")
def tight():
    # New tokens are reserved optimistically, so that running out of slots, and retraction, really happens.
    with Server(tiny_model(), *LAPROX, *FLAGS, "--schedule-conservativeness", "0.1", tokens=1500) as running:
        yield running


def test_retraction_under_a_tiny_pool(tight):
    tight.flush()
    prompts = [tokens(200 + 10 * index, 700 + index) for index in range(8)]
    # With ignore_eos SGLang reserves every token at admission, and nothing is ever retracted.
    replies = tight.together(prompts, 300, sampling={"ignore_eos": False, "logit_bias": {"2": -100}})
    assert all(len(reply["output_ids"]) == 300 for reply in replies)
    assert sum(reply["meta_info"].get("num_retractions", 0) for reply in replies) > 0
    state = tight.idle_slots()
    assert state["slots_held"] + state["slots_free"] == 1500
    tight.flush()
    assert tight.idle_slots()["slots_free"] == 1500


def test_more_prefixes_than_the_pool_holds_dense(tight):
    """Twelve documents of 400 tokens: dense they need 4,800 slots, the pool has 1,500 and keeps them all."""
    tight.flush()
    documents = [tokens(400, 800 + index) for index in range(12)]
    for document in documents:
        tight.generate(document, 2)
    again = [tight.generate([*document, 5, 6, 7], 2)["meta_info"]["cached_tokens"] for document in documents]
    assert all(cached >= 400 for cached in again)


def test_abandoned_requests_leave_nothing_behind(tight):
    tight.flush()
    draw = random.Random(1)

    def abandon(index: int) -> None:
        body = {
            "input_ids": tokens(draw.randint(20, 700), 900 + index),
            "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
            "stream": True,
        }
        try:
            with tight.client.stream("POST", "/generate", json=body, timeout=draw.choice([0.05, 0.3, 1.0])) as reply:
                for count, _ in enumerate(reply.iter_lines()):
                    if count > draw.randint(0, 40):
                        break
        except httpx.TimeoutException:
            pass

    threads = [threading.Thread(target=abandon, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tight.client.post("/abort_request", json={"abort_all": True})
    tight.idle_slots()
    tight.flush()
    assert tight.idle_slots()["slots_free"] == 1500
    assert len(tight.generate(tokens(300, 999), 10)["output_ids"]) == 10
