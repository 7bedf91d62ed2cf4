"""The scripted chat's table and picture."""

from __future__ import annotations

from xml.etree import ElementTree

from laprox_sglang.chat import report
from laprox_sglang.chat.client import CacheState, Turn


def turn(**changes) -> Turn:
    values = {
        "question": "q",
        "answer": "a",
        "prompt_tokens": 1500,
        "answer_tokens": 11,
        "cached_tokens": 1480,
        "first_token_seconds": 0.5,
        "seconds": 1.5,
        "cache": CacheState(400, 1100),
    }
    return Turn(**{**values, **changes})


PLAIN = turn(cached_tokens=None, first_token_seconds=None, cache=CacheState())


def test_table_is_aligned_and_complete():
    lines = report.table([("chat 1, turn 1", turn()), ("chat 1, turn 2", PLAIN)]).split("\n")
    assert lines[0].split() == ["turn", "prompt", "cached", "first", "answer", "slots", "slots"]
    assert lines[1].split() == ["tokens", "tokens", "token,", "s", "tokens/s", "held", "saved"]
    assert lines[3].split()[4:] == ["1,500", "1,480", "0.50", "10.0", "400", "1,100"]
    assert lines[4].split()[4:] == ["1,500", "-", "-", "-", "-", "-"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_zero_is_a_number_and_not_a_gap():
    assert report.cells("x", turn(cached_tokens=0, cache=CacheState(0, 0)))[2:] == ("0", "0.50", "10.0", "0", "0")


def test_legend_adds_up():
    assert "holds 400 slots" in report.legend([("x", turn())])
    assert "would hold 1,500" in report.legend([("x", turn())])
    assert "no compressed cache" in report.legend([("x", PLAIN)])
    assert "no compressed cache" in report.legend([])


def test_tokens_per_second_needs_two_tokens():
    assert turn(answer_tokens=1).tokens_per_second is None
    assert turn(seconds=0.5).tokens_per_second is None


def test_picture_is_valid_and_has_a_bar_per_known_number():
    root = ElementTree.fromstring(report.picture([("a<b", turn()), ("c", PLAIN)], "Title & more"))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "Title & more",
        "a<b: 1,500 prompt tokens",
        "a<b: 1,480 of them cached",
        "a<b: 400 slots held by the cache",
        "c: 1,500 prompt tokens",
    ]


def test_picture_of_nothing_is_valid():
    ElementTree.fromstring(report.picture([], "empty"))
    ElementTree.fromstring(report.picture([("x", turn(prompt_tokens=0, cached_tokens=0, cache=CacheState()))], "zero"))
