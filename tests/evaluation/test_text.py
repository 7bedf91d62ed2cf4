"""That the evaluation's texts are real, apart and enough."""

import pytest

from laprox_sglang.evaluation.text import docstrings, documents, manual, words


class Words:
    def encode(self, text: str) -> list[int]:
        return [hash(word) % 1000 for word in text.split()]


def test_documents_do_not_overlap(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(str(number) for number in range(1000)))
    pieces = documents([file], Words(), 100, 5)
    assert [len(piece) for piece in pieces] == [100] * 5
    assert len({tuple(piece) for piece in pieces}) == 5
    with pytest.raises(ValueError, match="10 pieces of 100 tokens, 11 are asked for"):
        documents([file], Words(), 100, 11)


def test_python_brings_enough_prose_and_words():
    assert len(documents([], Words(), 2200, 16)) == 16
    assert len(manual()) > 300_000 and len(docstrings()) > 300_000
    listed = words()
    assert len(listed) > 1500 and listed == sorted(set(listed))
    assert all(word.isalpha() and word.islower() for word in listed)
