"""The arithmetic of the evaluation, and that its texts are real, apart and enough."""

import math

import pytest

from laprox_sglang.evaluation.fidelity import Reading, compare
from laprox_sglang.evaluation.text import documents


class Words:
    def encode(self, text: str) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]


def test_nothing_lost_against_itself():
    readings = [Reading((-1.0, -2.0), (3, 4), 50), Reading((-0.5,), (9,), 50)]
    result = compare(readings, readings, 100)
    assert (result.loss, result.loss_error, result.agreement, result.held) == (0, 0, 1, 0.5)


def test_losses_are_averaged_over_documents_and_agreement_over_tokens():
    full = [Reading((-1.0, -1.0), (1, 2), 100), Reading((-1.0,), (3,), 100)]
    ours = [Reading((-1.5, -1.5), (1, 9), 20), Reading((-2.0,), (3,), 30)]
    result = compare(ours, full, 100)
    assert result.loss == pytest.approx(0.75) and result.agreement == pytest.approx(2 / 3)
    assert result.loss_error == pytest.approx(0.25) and result.held == pytest.approx(0.25)
    assert math.isnan(compare(ours[:1], full[:1], 100).loss_error)


def test_documents_do_not_overlap(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(str(number) for number in range(1000)))
    pieces = documents([file], Words(), 100, 5)
    assert [len(piece) for piece in pieces] == [100] * 5
    assert len({tuple(piece) for piece in pieces}) == 5
    with pytest.raises(ValueError, match="10 pieces of 100 tokens, 11 are asked for"):
        documents([file], Words(), 100, 11)


def test_the_manual_is_long_enough_for_the_defaults():
    assert len(documents([], Words(), 2200, 16)) == 16
