"""Generated items: what they ask can be answered, they have the wanted length, and a seed gives the same items."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from laprox_sglang import demo_model
from laprox_sglang.evaluation.command import TASK_NAMES
from laprox_sglang.evaluation.items import MARK, Item, tokenise
from laprox_sglang.evaluation.tasks import TASKS, generate


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(demo_model.ensure(progress=False)))


def test_the_command_knows_all_tasks():
    assert tuple(TASKS) == TASK_NAMES
    with pytest.raises(ValueError, match="unknown task 'no'; choose from needle"):
        generate("no", None, [100], 1, 0)


@pytest.mark.parametrize("task", TASKS)
def test_items(task, tokenizer):
    items = generate(task, tokenizer, [600, 1000], 4, 3)
    assert items == generate(task, tokenizer, [600, 1000], 4, 3)
    assert items[0].messages != generate(task, tokenizer, [600, 1000], 4, 4)[0].messages
    for item, length in zip(items, (600, 1000, 600, 1000), strict=True):
        prompt = tokenise(item, tokenizer)
        text = "".join(message["content"] for message in item.messages)
        document, question = text.split(MARK)
        assert abs(len(prompt.document) - length) < 0.12 * length
        assert item.meta["length"] == length
        assert tokenizer.decode(prompt.all) == tokenizer.decode(prompt.asked) + item.answer
        for expected in item.expected:
            assert expected in document or item.meta.get("about") == "turn"
            assert expected in item.answer and expected not in question.split("?")[-2][-200:]
        assert len(prompt.answer) <= item.new_tokens or not item.expected


def test_the_needle_goes_through_the_depths(tokenizer):
    places = []
    for item in generate("needle", tokenizer, [800], 5, 0):
        document = item.messages[0]["content"].split(MARK)[0]
        places.append(document.index(item.expected[0]) / len(document))
    assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.95


def test_word_counts_are_what_is_asked(tokenizer):
    item = generate("common", tokenizer, [1000], 1, 0)[0]
    words = [part for part in item.messages[0]["content"].split(MARK)[0].split() if part.isalpha()]
    assert all(words.count(word) >= 20 for word in item.expected)
    others = set(words) - set(item.expected)
    assert max(words.count(word) for word in others) <= 4
    item = generate("frequent", tokenizer, [1000], 1, 0)[0]
    words = item.messages[0]["content"].split(MARK)[0].split()
    counts = [words.count(word) for word in item.expected]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] > max(words.count(word) for word in set(words) - set(item.expected))


def test_a_quote_is_in_the_document(tokenizer):
    for item in generate("quote", tokenizer, [800], 3, 0):
        document = " ".join(item.messages[0]["content"].split(MARK)[0].split())
        assert item.answer in document and len(item.answer.split()) == 48


def test_a_mark_too_many_is_refused(tokenizer):
    with pytest.raises(ValueError, match="has 2 marks"):
        tokenise(Item("x", 0, [{"role": "user", "content": MARK + MARK}], ""), tokenizer)
