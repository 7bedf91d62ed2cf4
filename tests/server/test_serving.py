"""What a running server does: frees memory, shares prefixes, keeps turns, leaves short prompts alone.

All of it under SGLang's own strict leak check, after every step (see ``harness.STRICT``).
"""

import math

import pytest

from tests.server.conftest import EXACT_FLAGS, NEW, short_prompts
from tests.server.harness import LAPROX, Server, cached, peak_while
from tests.server.tiny_models import tiny_model, tokens

FLAGS = ("--dtype", "float32", "--skip-tokenizer-init")
WINDOW, MIN_TOKENS, RATIO = 32, 128, 0.25


@pytest.fixture(scope="module")
def server():
    with Server(tiny_model(), *LAPROX, *EXACT_FLAGS, "--laprox-ratio", str(RATIO)) as running:
        yield running


@pytest.fixture
def empty(server):
    """The server with an empty cache, whose pool must be whole; and again afterwards."""
    server.flush()
    before = server.idle_slots()
    assert before["slots_free"] == before["slots_total"] and before["segments"] == 0
    yield server
    server.flush()
    after = server.idle_slots()
    assert after["slots_free"] == after["slots_total"] and after["segments"] == 0


def test_prompt_is_compressed_once_and_shared(empty):
    document = tokens(4000, 1)
    first = empty.generate(document + tokens(40, 2), 8)
    assert cached(first) == 0
    compressed = empty.idle_slots()
    second = empty.generate(document + tokens(40, 3), 8)
    assert cached(second) >= 3990
    after = empty.idle_slots()
    # Only the second question and its answer are new, and they are too short to be compressed.
    assert after["tokens_compressed"] == compressed["tokens_compressed"]
    assert after["compressions"] == compressed["compressions"]


def test_copies_of_one_prompt_share_it(empty):
    prompt = tokens(1000, 4)
    replies = empty.generate(prompt, 8, sampling={"n": 4})
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    held = empty.idle_slots()["slots_held"]
    # One prompt, of it the window dense, and four equal answers that share one copy.
    assert held <= math.ceil(RATIO * (1000 - WINDOW)) + WINDOW + 8 + 4


def test_identical_prompts_in_one_batch_end_on_one_copy(empty):
    prompt = tokens(900, 5)
    compressed = empty.idle_slots()["compressions"]
    # One HTTP request, so that all four are there when the scheduler makes its batch.
    replies = empty.generate([prompt] * 4, 8)
    assert [cached(reply) for reply in replies] == [0] * 4
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    state = empty.idle_slots()
    assert state["tokens_cached"] <= 900 + 8
    assert state["compressions"] - compressed == 1
    assert state["slots_held"] <= math.ceil(RATIO * (900 - WINDOW)) + WINDOW + 8 + 4


def test_ten_turns_keep_every_token(empty):
    history: list[int] = []
    previous = 0
    for turn in range(10):
        history += tokens(150 + 10 * turn, 20 + turn)
        reply = empty.generate(history, 30)
        # The last token of an answer has no KV yet: it is computed with the next turn.
        assert cached(reply) == max(0, previous - 1)
        history += reply["output_ids"]
        previous = len(history)
        state = empty.idle_slots()
        assert state["tokens_cached"] == previous - 1
    assert state["slots_saved"] > 0.4 * previous
    assert state["slots_held"] + state["slots_saved"] == state["tokens_cached"]


def test_a_long_answer_is_compressed_when_it_ends(empty):
    reply = empty.generate(tokens(200, 40), 300)
    state = empty.idle_slots()
    total = 200 + 300 - 1
    assert state["tokens_cached"] == total
    assert state["slots_held"] <= math.ceil(RATIO * total) + 3
    again = empty.generate(tokens(200, 40) + reply["output_ids"] + tokens(20, 41), 4)
    assert cached(again) == total


def test_budget_bounds_what_a_long_prompt_holds():
    budget, total = 256, 8192
    with Server(tiny_model(), *LAPROX, *FLAGS, "--laprox-budget-tokens", str(budget), tokens=total) as server:
        body = {**Server.body(tokens(6000, 60), 100), "stream": True}
        with server.client.stream("POST", "/generate", json=body) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
            next(lines)
            # The first token has just come: the prompt is compressed, the request is running.
            running = server.laprox()
            for _ in lines:
                pass
        used = total - running["slots_free"]
        assert running["compressions"] == 1
        assert used <= budget + WINDOW + 20, f"{used} slots right after the prefill of 6,000 tokens"
        state = server.idle_slots()
        # The rest, the window and the answer without its last token, is shorter than the budget and kept whole.
        rest = WINDOW + 100 - 1
        assert rest >= MIN_TOKENS and state["compressions"] == 2
        assert state["entries_kept"] == (budget + rest) * 2 * 2
        server.flush()
        whole = server.idle_slots()
        assert whole["slots_free"] == whole["slots_total"] == total


def test_short_prompts_are_left_whole_and_equal_stock(empty, stock):
    before = empty.idle_slots()
    found = [empty.generate(prompt, NEW)["output_ids"] for prompt in short_prompts()]
    after = empty.idle_slots()
    assert found == stock["short"]
    assert (after["compressions"], after["entries_dropped"]) == (before["compressions"], before["entries_dropped"])


def test_without_rescoring_a_long_answer_grows(empty):
    """The control of ``test_rescore``: while it is written, an answer of 1,000 tokens holds 1,000 slots."""
    most = peak_while(empty, lambda: empty.generate(tokens(200, 70), 1000))
    assert most >= 1000


def documents_and_chats() -> tuple[list, list]:
    documents = [tokens(700 + 150 * index, 300 + index) for index in range(4)]
    chats = [documents[index % 4] + tokens(10 + 17 * index, 400 + index) for index in range(16)]
    return documents, chats


MODES = {"overlap": (), "no-overlap": ("--disable-overlap-schedule",), "mixed": ("--enable-mixed-chunk",)}


@pytest.fixture(scope="module", params=MODES)
def chunking(request):
    flags = ("--laprox-ratio", str(RATIO), "--chunked-prefill-size", "512", *MODES[request.param])
    with Server(tiny_model(), *LAPROX, *FLAGS, *flags) as running:
        yield running


def test_concurrent_chats_equal_their_solo_runs(chunking):
    """No cross-talk, no dependence on timing: the documents are sent first, so that a solo run is well defined."""
    documents, chats = documents_and_chats()

    def prepare() -> None:
        chunking.flush()
        for document in documents:
            chunking.generate(document, 4)

    solo = []
    for index, chat in enumerate(chats):
        if index % 4 == 0:
            prepare()
        solo.append(chunking.generate(chat, 40)["output_ids"])
    for _ in range(2):
        prepare()
        prepared = chunking.idle_slots()
        replies = chunking.together(chats, 40)
        assert [reply["output_ids"] for reply in replies] == solo
        assert all(cached(reply) >= 700 for reply in replies)
        assert chunking.idle_slots()["tokens_compressed"] > prepared["tokens_compressed"]


def test_chunked_prefill_is_compressed_as_one_stretch(chunking, empty):
    prompt = tokens(3000, 50)
    chunking.flush()
    whole, chunked = empty.generate(prompt, 24), chunking.generate(prompt, 24)
    assert chunked["output_ids"] == whole["output_ids"]
    names = ("slots_held", "segments", "tokens_cached")
    held, expected = chunking.idle_slots(), empty.idle_slots()
    assert [held[name] for name in names] == [expected[name] for name in names]
