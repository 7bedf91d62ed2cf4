"""How answers are judged: string match for the generated tasks, LongBench's and InfiniteBench's own metrics.

Written after the benchmarks' published definitions; ``tests/evaluation/test_metrics.py`` holds worked examples.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from laprox_sglang.evaluation.items import Item, contains


def judge(item: Item, answer: str) -> float:
    """From 0 to 1. Raises KeyError for a metric that does not exist."""
    if item.metric == "contains":
        return contains(answer, item.expected)
    if item.metric.startswith("infinite_"):
        from laprox_sglang.evaluation.infinite_metrics import INFINITE_METRICS

        return INFINITE_METRICS[item.metric.removeprefix("infinite_")](answer, item.meta["label"])
    metric = METRICS[item.metric]
    return max(metric(answer, expected, item.meta) for expected in item.expected)


def normalised_words(text: str) -> list[str]:
    """Lower case, no punctuation, no English articles (SQuAD's normalisation)."""
    kept = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def token_f1(found: Sequence[str], expected: Sequence[str]) -> float:
    same = sum((Counter(found) & Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(found), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def word_f1(answer: str, expected: str, meta: dict[str, Any]) -> float:
    return token_f1(normalised_words(answer), normalised_words(expected))


def rouge_l(answer: str, expected: str, meta: dict[str, Any]) -> float:
    """F1 of the longest common subsequence of words, sentence by sentence union as the ``rouge`` package has it."""
    found, wanted = _sentences(answer), _sentences(expected)
    if not found or not wanted:
        return 0.0
    union: set[str] = set()
    for reference in wanted:
        for sentence in found:
            union.update(_common_subsequence(reference, sentence))
    count_found = len({word for sentence in found for word in sentence})
    count_wanted = len({word for sentence in wanted for word in sentence})
    precision, recall = len(union) / count_found, len(union) / count_wanted
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [words for words in (part.split() for part in text.split(".")) if words]


def _common_subsequence(first: list[str], second: list[str]) -> list[str]:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, two in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if one == two else max(table[i][j + 1], table[i + 1][j])
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append(first[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def share_of_numbers(answer: str, expected: str, meta: dict[str, Any]) -> float:
    """Of the numbers in the answer, the share that is the expected one."""
    wanted = re.findall(r"\d+", expected)[0]
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, expected: str, meta: dict[str, Any]) -> float:
    """Edit similarity of the first line that is code, in whole per cent."""
    lines = answer.lstrip("\n").split("\n")
    line = next((each for each in lines if not any(mark in each for mark in ("`", "#", "//"))), "")
    if not line and not expected:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, expected).ratio()) / 100


def class_name(answer: str, expected: str, meta: dict[str, Any]) -> float:
    """Right when the class is named; shared with the other classes that are named too."""
    named = [each for each in meta["all_classes"] if each in answer]
    named = [each for each in named if not (each in expected and each != expected)]
    return 1 / len(named) if expected in named else 0.0


def first_line(metric: Callable[[str, str, dict[str, Any]], float]) -> Callable[[str, str, dict[str, Any]], float]:
    return lambda answer, expected, meta: metric(answer.lstrip("\n").split("\n")[0], expected, meta)


METRICS: dict[str, Callable[[str, str, dict[str, Any]], float]] = {
    "f1": word_f1,
    "rouge": rouge_l,
    "numbers": share_of_numbers,
    "code": code_similarity,
    "class": first_line(class_name),
    "first_f1": first_line(word_f1),
    "first_rouge": first_line(rouge_l),
}
