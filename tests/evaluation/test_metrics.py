"""Worked examples of the benchmarks' metrics; the figures were worked out by hand from their definitions."""

import pytest

from laprox_sglang.evaluation.benchmarks import INFINITEBENCH, LONGBENCH, settings
from laprox_sglang.evaluation.infinite_metrics import INFINITE_METRICS, rouge_l_sum
from laprox_sglang.evaluation.items import Item, contains, one_turn
from laprox_sglang.evaluation.metrics import METRICS, judge, rouge_l, word_f1


def item(metric, expected, **meta):
    return Item("task", 0, one_turn("", ""), "", expected, metric=metric, meta=meta)


def test_every_data_set_has_a_metric():
    assert {each["metric"] for each in settings(LONGBENCH).values()} <= set(METRICS)
    assert set(settings(INFINITEBENCH)) == set(INFINITE_METRICS)
    assert len(settings(LONGBENCH)) == 16 and len(settings(INFINITEBENCH)) == 12
    assert len({each["domain"] for each in settings(LONGBENCH).values()}) == 6


def test_contains_counts_each_expected_string_in_any_case():
    assert contains("The codes are 12 and ABC.", ["12", "abc", "34", "56"]) == 0.5


def test_word_f1():
    assert word_f1("The cat sat.", "a cat sat down", {}) == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert word_f1("dog", "cat", {}) == 0 and word_f1("", "cat", {}) == 0


def test_the_best_expected_answer_counts():
    assert judge(item("f1", ["nothing", "blue whale"]), "Blue whale!") == 1


def test_rouge_l():
    assert rouge_l("the cat sat", "the cat sat", {}) == pytest.approx(1, abs=1e-6)
    # "a c d" of both: 3 of the 4 words here and 3 of the 5 there
    assert rouge_l("a b c d", "a c x d y", {}) == pytest.approx(2 * 0.75 * 0.6 / 1.35, abs=1e-6)
    assert rouge_l("", "a b", {}) == 0


def test_numbers_share():
    assert judge(item("numbers", ["Paragraph 12"]), "Paragraph 12, or 3") == 0.5
    assert judge(item("numbers", ["7"]), "none") == 0


def test_code_similarity_takes_the_first_line_of_code():
    assert judge(item("code", ["return x"]), "\n# a comment\nreturn x\nmore") == 1
    assert judge(item("code", ["return x"]), "return y") == pytest.approx(0.88)


def test_class_is_shared_between_the_named_ones():
    classes = ["Date", "Date range", "City"]
    assert judge(item("class", ["City"], all_classes=classes), "City\nDate") == 1
    assert judge(item("class", ["City"], all_classes=classes), "City or Date") == 0.5
    assert judge(item("class", ["Date range"], all_classes=classes), "Date range") == 1
    assert judge(item("class", ["City"], all_classes=classes), "Person") == 0


def test_few_shot_answers_end_with_the_line():
    assert judge(item("first_f1", ["Paris"]), "\nParis\nQuestion: another") == 1


@pytest.mark.parametrize(
    ("name", "label", "answer", "expected"),
    [
        ("passkey", ["71432"], " is 71432. Remember", 1),
        ("passkey", ["71432"], "12 or 71432", 0),
        ("kv_retrieval", ["ab-cd"], '"ab-cd".', 1),
        ("kv_retrieval", ["ab-cd"], "ab-ce", 0),
        ("longdialogue_qa_eng", ["JOHN"], "John, I think", 1),
        ("code_run", 42, "The value is: 42.", 1),
        ("code_run", 42, "It is 41", 0),
        ("code_run", 42, "", 0),
        ("math_find", [3.5], "about 3.5", 1),
        ("math_find", [7], "7", 1),
        ("math_calc", [1, 2, 3, 4], "[1, 2, 9, 4]", 0.5),
        ("longbook_choice_eng", ["the castle", "B"], "B. The castle", 1),
        ("longbook_choice_eng", ["the castle", "B"], "I say that the answer is: C", 0),
        ("longbook_choice_eng", ["the castle", "B"], "perhaps B", 1),
        ("code_debug", ["load", "C"], "C. load", 1),
        ("code_debug", ["load", "C"], "The answer is: load", 1),
        ("code_debug", ["load", "C"], "The answer is: D", 0),
        ("longbook_qa_eng", ["the red house", "a barn"], "Barn", 1),
        ("longbook_qa_chn", ["北京"], "北京。", 1),
        ("longbook_qa_chn", ["北京"], "南京", 0.5),
    ],
)
def test_infinitebench(name, label, answer, expected):
    found = judge(item(f"infinite_{name}", ["unused"], label=label), answer)
    assert found == pytest.approx(expected)


def test_rouge_l_sum_goes_line_by_line():
    assert rouge_l_sum("b c\na", ["a\nb c"]) == 1
    assert rouge_l_sum("a b", ["a c"]) == 0.5
    assert rouge_l_sum("x", ["a"]) == 0
