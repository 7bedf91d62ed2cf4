"""LongBench and InfiniteBench from the benchmarks' own JSONL files, in a folder that the user names.

Prompt templates, answer lengths and the choice of metric are the benchmarks' (``longbench.json``,
``infinitebench.json``, with their source); nothing is downloaded. The document is what the template calls ``context``;
one that is too long loses its middle, as in LongBench's own script.
"""

from __future__ import annotations

import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation.items import MARK, Item
from laprox_sglang.evaluation.report import Report
from laprox_sglang.evaluation.run import MODES
from laprox_sglang.evaluation.variants import FULL

LONGBENCH, INFINITEBENCH = "longbench", "infinitebench"
_LETTERS = "ABCD"


@cache
def settings(benchmark: str) -> dict[str, dict[str, Any]]:
    """Of each data set: prompt, new_tokens, and for LongBench domain, metric, plain."""
    return json.loads((Path(__file__).parent / f"{benchmark}.json").read_text(encoding="utf-8"))["datasets"]


def longbench(folder: Path, count: int, tokenizer: Any, limit: int) -> list[Item]:
    """The first ``count`` questions of every data set whose ``<name>.jsonl`` is there.

    Raises FileNotFoundError when none of the 16 English and code sets is.
    """
    items = []
    for name, each in settings(LONGBENCH).items():
        for index, line in enumerate(_lines(folder / f"{name}.jsonl", count)):
            meta = {"benchmark": LONGBENCH, "dataset": name, "length": limit, "all_classes": line.get("all_classes")}
            fields = {"context": _shortened(line["context"], tokenizer, limit), "input": line["input"]}
            messages = [{"role": "user", "content": _filled(each["prompt"], fields)}]
            expected = list(line["answers"])
            items.append(
                Item(
                    f"{LONGBENCH}/{name}",
                    index,
                    messages,
                    f" {expected[0]}",
                    expected,
                    each["new_tokens"],
                    each["metric"],
                    meta,
                    each["plain"],
                )
            )
    return _some(items, folder, settings(LONGBENCH))


def infinitebench(folder: Path, count: int, tokenizer: Any, limit: int) -> list[Item]:
    """Likewise; all 12 sets."""
    items = []
    for name, each in settings(INFINITEBENCH).items():
        for index, line in enumerate(_lines(folder / f"{name}.jsonl", count)):
            label = _label(name, line)
            meta = {"benchmark": INFINITEBENCH, "dataset": name, "length": limit, "label": label}
            fields = {**_infinite_fields(name, line), "context": _shortened(line["context"], tokenizer, limit)}
            messages = [{"role": "user", "content": _filled(each["prompt"], fields)}]
            shown = label[0] if isinstance(label, list) else label
            items.append(
                Item(
                    f"{INFINITEBENCH}/{name}",
                    index,
                    messages,
                    f" {shown}",
                    [str(shown)],
                    min(each["new_tokens"], limit),
                    f"infinite_{name}",
                    meta,
                    plain=True,
                )
            )
    return _some(items, folder, settings(INFINITEBENCH))


def tables(report: Report) -> str:
    """LongBench as in the paper: a column for each domain and the mean over the sets; InfiniteBench set by set."""
    parts = []
    for benchmark in (LONGBENCH, INFINITEBENCH):
        names = [name for name in settings(benchmark) if f"{benchmark}/{name}" in report.tasks]
        if names:
            parts += [_table(report, benchmark, names, mode) for mode in MODES]
    return "\n".join(part for part in parts if part)


def _table(report: Report, benchmark: str, names: list[str], mode: str) -> str:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(settings(benchmark)[name].get("domain", name), []).append(name)
    lines = []
    for policy in [FULL, *report.policies]:
        for ratio in [1.0] if policy == FULL else report.ratios:
            means = {}
            for name in names:
                task = f"{benchmark}/{name}"
                found = [
                    row["accuracy"]
                    for row in report.rows
                    if (row["task"], row["mode"], row["policy"], row["ratio"]) == (task, mode, policy, ratio)
                    and "accuracy" in row
                ]
                if found:
                    means[name] = 100 * statistics.fmean(found)
            if means:
                columns = [[means[name] for name in group if name in means] for group in groups.values()]
                cells = [f"{statistics.fmean(column):.2f}" if column else "-" for column in columns]
                cells.append(f"{statistics.fmean(means.values()):.2f}")
                lines.append(f"| {policy} | {ratio:g} | " + " | ".join(cells) + " |")
    if not lines:
        return ""
    head = f"**{benchmark}, question-{mode}**\n\n| policy | ratio | {' | '.join(groups)} | mean |\n"
    return "\n" + head + "|---" * (len(groups) + 3) + "|\n" + "\n".join(lines) + "\n"


def _lines(path: Path, count: int) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if len(found) == count:
                break
            if line.strip():
                found.append(json.loads(line))
    return found


def _some(items: list[Item], folder: Path, known: dict[str, Any]) -> list[Item]:
    if not items:
        raise FileNotFoundError(f"{folder} holds none of {', '.join(f'{name}.jsonl' for name in known)}")
    return items


def _shortened(context: str, tokenizer: Any, limit: int) -> str:
    tokens = tokenizer.encode(context, add_special_tokens=False)
    if len(tokens) <= limit:
        return context
    half = limit // 2
    return tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[-half:])


def _filled(prompt: str, fields: dict[str, str]) -> str:
    """Not ``str.format``: contexts and questions hold braces. The mark goes behind the context."""
    pattern = re.compile("|".join(re.escape("{" + name + "}") for name in fields))
    text = pattern.sub(lambda found: _field(found.group()[1:-1], fields), prompt)
    return text


def _field(name: str, fields: dict[str, str]) -> str:
    value = fields[name].replace(MARK, "")
    return value + MARK if name == "context" else value


def _label(name: str, line: dict[str, Any]) -> Any:
    """The answer, and for a choice the text and the letter of the right option."""
    answer = line["answer"]
    if name not in ("code_debug", "longbook_choice_eng"):
        return answer
    if isinstance(answer, list) and len(answer) == 2 and answer[1] in _LETTERS:
        return answer
    right = answer[0] if isinstance(answer, list) else answer
    return [right, _LETTERS[line["options"].index(right)]]


def _infinite_fields(name: str, line: dict[str, Any]) -> dict[str, str]:
    fields = {"input": line.get("input") or ""}
    for letter, option in zip(_LETTERS, line.get("options") or (), strict=False):
        fields[f"OPTION_{letter}"] = option
    if name == "code_run":
        call = re.findall(r"func_[0-9]+\(-?[0-9]+\)", fields["input"])[0]
        fields |= {"func_call": call, "func": call.split("(")[0]}
    if name == "math_find":
        target = re.findall(r"The .+ of", fields["input"])[0].lower()[:-3]
        fields["prefix"] = f"What is {target} in the following list?"
    return fields
