"""Rows, tables and benchmark files, without an engine."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys

import pytest

from laprox_sglang.evaluation import benchmarks, plots
from laprox_sglang.evaluation.items import MARK
from laprox_sglang.evaluation.report import Report, mean_of
from laprox_sglang.evaluation.run import solved_tasks
from laprox_sglang.evaluation.store import Store
from laprox_sglang.evaluation.variants import Variant, of_grid, of_policies


class Words:
    """A word a token."""

    def encode(self, text, add_special_tokens=True):
        return text.split()

    def decode(self, tokens):
        return " ".join(tokens)


def row(policy, ratio, index, kl, task="needle", mode="aware", **more):
    key = {"model": "m", "seed": 0, "task": task, "index": index, "length": 100, "mode": mode}
    return {**key, "policy": policy, "ratio": ratio, "kl": kl, "share": ratio, "depth": index / 4, **more}


def rows():
    found = [row("full", 1.0, index, 0.0, accuracy=1.0) for index in range(3)]
    found += [row("laprox", 0.1, index, index / 10, accuracy=float(index > 0)) for index in range(3)]
    found += [row("random", 0.1, index, 1 + index / 10, accuracy=0.0) for index in range(3)]
    found += [row("-", 1.0, index, None, mode="-", accuracy=1.0) for index in range(3)]
    found += [row("laprox", 0.1, 0, 5.0, task="tracking", accuracy=0.0)]
    found += [row("-", 1.0, 0, None, task="tracking", mode="-", accuracy=0.5)]
    return found


def test_rows_survive_a_kill(tmp_path):
    store = Store(tmp_path)
    store.add(rows())
    with store.path.open("a") as file:
        file.write('{"model": "m", "cut')
    again = Store(tmp_path)
    assert again.rows == rows()
    key = {"model": "m", "seed": 0, "task": "needle", "index": 1, "length": 100, "mode": "aware"}
    assert again.find(**key, policy="laprox", ratio=0.1)["kl"] == 0.1
    assert again.find(**key, policy="laprox", ratio=0.2) is None


def test_mean_and_interval():
    found = mean_of([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(1.96 / math.sqrt(3))
    assert math.isnan(mean_of([1.0]).half)


def test_a_task_counts_where_the_full_cache_solves_it():
    assert solved_tasks(rows(), "m", 0) == {"needle": True, "tracking": False}
    report = Report(rows(), "m", 0)
    assert report.values("accuracy", "aware", "laprox", 0.1) == {
        ("needle", 0): 0.0,
        ("needle", 1): 1.0,
        ("needle", 2): 1.0,
    }
    assert len(report.values("kl", "aware", "laprox", 0.1)) == 4


def test_tables_differences_and_csv(tmp_path):
    report = Report(rows(), "m", 0)
    text = report.markdown()
    assert "| random | 1.100 ± 0.113 |" in text and "| full | 0.000 ± 0.000 |" in text
    assert "| random | +1.000 ± 0.000 |" in report.differences("kl", "aware", "laprox")
    assert "| tracking | 1 | 0.500 | does not count |" in text
    assert "0.1: 0.1000 to 0.1000" in report.held()
    report.write_csv(tmp_path / "eval.csv")
    lines = list(csv.DictReader((tmp_path / "eval.csv").open()))
    line = next(each for each in lines if each["policy"] == "random")
    assert (line["task"], line["items"], float(line["kl"])) == ("needle", "3", pytest.approx(1.1))
    assert Report(rows(), "other", 0).markdown().count("|") == 0


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra 'eval'")
    names = {path.name for path in plots.write(Report(rows(), "m", 0), tmp_path)}
    assert names == {"kl.png", "accuracy.png", "needle-aware.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_variants():
    assert [each.key for each in of_policies(["laprox", "headkv"], [0.1, 0.2], None)] == ["laprox@0.1", "laprox@0.2"]
    assert of_policies(["headkv"], [0.1], "file")[0].settings == {"policy": "headkv", "profile": "file"}
    grid = of_grid(["laprox", "attention"], ["head", "model"], [1, 21], [0.1])
    assert len(grid) == 8 and isinstance(grid[0], Variant) and grid[0].name == "laprox/head/1"


def test_longbench_files(tmp_path):
    lines = [
        {"context": "a {brace} text " * 40, "input": "Who {context}?", "answers": ["Ann", "Bob"], "all_classes": None}
    ] * 3
    (tmp_path / "hotpotqa.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    items = benchmarks.longbench(tmp_path, 2, Words(), 30)
    assert len(items) == 2 and items[0].expected == ["Ann", "Bob"] and items[0].new_tokens == 32
    text = items[0].messages[0]["content"]
    document, question = text.split(MARK)
    assert document.startswith("Answer the question based on the given passages.")
    assert question.endswith("Question: Who {context}?\nAnswer:")
    assert "a {brace} text" in document and len(document.split()) < 70
    with pytest.raises(FileNotFoundError, match=r"narrativeqa\.jsonl"):
        benchmarks.longbench(tmp_path / "none", 2, Words(), 30)


def test_infinitebench_files(tmp_path):
    options = ["red", "green", "blue", "white"]
    question = {"context": "story", "input": "Which?", "answer": ["blue"], "options": options}
    (tmp_path / "longbook_choice_eng.jsonl").write_text(json.dumps(question))
    code = {"context": "def func_1(x): ...", "input": "Give me func_1(-5) please", "answer": 7}
    (tmp_path / "code_run.jsonl").write_text(json.dumps(code))
    choice, run = benchmarks.infinitebench(tmp_path, 5, Words(), 100)
    assert choice.meta["label"] == ["blue", "C"] and "C. blue" in choice.messages[0]["content"]
    assert "The value of func_1(-5) is" in run.messages[0]["content"] and run.metric == "infinite_code_run"


def test_longbench_table_has_domains_and_the_mean_of_sets():
    found = []
    for name, accuracy in (("hotpotqa", 0.2), ("musique", 0.4), ("lcc", 0.9)):
        found.append(row("laprox", 0.1, 0, 0.0, task=f"longbench/{name}", accuracy=accuracy))
    table = benchmarks.tables(Report(found, "m", 0))
    assert "| policy | ratio | Multi-doc QA | Code | mean |" in table
    assert "| laprox | 0.1 | 30.00 | 90.00 | 50.00 |" in table


def test_a_server_imports_neither_plots_nor_evaluation():
    """Choosing a policy costs nothing when it is not used."""
    code = (
        "import sys; import laprox_sglang.runtime, laprox_sglang.plugin; laprox_sglang.plugin.activate(); "
        "print([m for m in sys.modules if m.startswith(('matplotlib', 'laprox_sglang.evaluation'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr
