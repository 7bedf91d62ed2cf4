"""InfiniteBench's metrics, one for each data set, after the benchmark's ``compute_scores.py``.

Each takes the answer and the data set's label, and returns 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from laprox_sglang.evaluation.metrics import normalised_words, token_f1

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def _spaced(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, " ")
    return text


def _one(label: Any) -> Any:
    return label[0] if isinstance(label, list) else label


def first_number(answer: str, label: Any) -> float:
    found = re.search(r"[0-9]+", answer)
    return float(found is not None and found.group() == str(_one(label)))


def named_value(answer: str, label: Any) -> float:
    return float(_one(label) in _spaced(answer, "\n:\"'.,?!{}").split())


def speaker(answer: str, label: Any) -> float:
    return float(_one(label) in [word.upper() for word in _spaced(answer, "\n:\"'.,?!{}").split()])


def last_number(answer: str, label: Any) -> float:
    words = _spaced(answer.strip(), "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(_one(label)))
    except ValueError:
        return 0.0


def first_decimal(answer: str, label: Any) -> float:
    found = re.search(r"\d+\.\d+|\d+", answer)
    wanted = _one(label)
    if found is None:
        return 0.0
    return float(
        float(found.group()) == wanted if isinstance(wanted, float) else int(float(found.group())) == int(wanted)
    )


def running_values(answer: str, label: Any) -> float:
    """Share of the values that are right before the first wrong one."""
    numbers = [int(each) for each in re.findall(r"[0-9]+", answer)]
    right = 0
    for found, wanted in zip(numbers, label, strict=False):
        if found != wanted:
            break
        right += 1
    return right / len(label)


def option(answer: str, label: Any) -> float:
    """Choice among A to D, by its first letter, behind an announcement, or the first letter that stands alone."""
    if answer[:1] in tuple("ABCD"):
        return float(answer[0] in label)
    text = re.sub(" +", " ", _spaced(answer, "\n\"'.,?!{}"))
    for announcement in ("answer is:", "answer:", "answer is", "option is"):
        if announcement in text:
            rest = text[text.index(announcement) + len(announcement) + 1 :]
            return float(any(rest.startswith(each) for each in label))
    letters = [word for word in text.split() if word in ("A", "B", "C", "D")]
    return float(bool(letters) and letters[0] in label)


def faulty_function(answer: str, label: Any) -> float:
    name, letter = label
    if answer[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" +", " ", _spaced(answer.strip(), ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    for announcement in ("answer is:", "is:", "answer:"):
        if announcement in text:
            rest = text[text.index(announcement) + len(announcement) + 1 :]
            return float(rest.startswith(letter) or rest.startswith(name))
    return 0.0


def best_f1(answer: str, label: Any) -> float:
    labels = label if isinstance(label, list) else [label]
    return max(token_f1(normalised_words(answer), normalised_words(each)) for each in labels)


def best_character_f1(answer: str, label: Any) -> float:
    def characters(text: str) -> list[str]:
        kept = (each for each in text.lower() if each not in string.punctuation + _CHINESE_PUNCTUATION)
        return [each for each in kept if not each.isspace()]

    labels = label if isinstance(label, list) else [label]
    return max(token_f1(characters(answer), characters(each)) for each in labels)


def rouge_l_sum(answer: str, label: Any) -> float:
    """ROUGE-Lsum F1: of each line of the label, the words that any line of the answer has in the same order."""

    def lines(text: str) -> list[list[str]]:
        return [words for words in (re.findall(r"[a-z0-9]+", line.lower()) for line in text.split("\n")) if words]

    found, wanted = lines(answer), lines(_one(label))
    if not found or not wanted:
        return 0.0
    left: dict[str, int] = {}
    for word in (word for line in found for word in line):
        left[word] = left.get(word, 0) + 1
    hits = 0
    for line in wanted:
        places = {place for other in found for place in _common_places(line, other)}
        for place in sorted(places):
            if left.get(line[place], 0):
                left[line[place]] -= 1
                hits += 1
    precision, recall = hits / sum(map(len, found)), hits / sum(map(len, wanted))
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def _common_places(first: list[str], second: list[str]) -> list[int]:
    """Places in ``first`` of a longest common subsequence."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, two in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if one == two else max(table[i][j + 1], table[i + 1][j])
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return found


INFINITE_METRICS: dict[str, Callable[[str, Any], float]] = {
    "passkey": first_number,
    "number_string": first_number,
    "kv_retrieval": named_value,
    "longbook_sum_eng": rouge_l_sum,
    "longbook_choice_eng": option,
    "longbook_qa_eng": best_f1,
    "longbook_qa_chn": best_character_f1,
    "longdialogue_qa_eng": speaker,
    "math_find": first_decimal,
    "math_calc": running_values,
    "code_run": last_number,
    "code_debug": faulty_function,
}
