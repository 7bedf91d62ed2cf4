"""Means over items, as CSV and as Markdown tables."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laprox_sglang.evaluation.run import MODES, SOLVED, solved_tasks
from laprox_sglang.evaluation.store import Row
from laprox_sglang.evaluation.variants import FULL

# figure -> (title, digits, whether more is better)
FIGURES = {
    "kl": ("KL to the full cache, nats per answer token", 3, False),
    "loss": ("loss against the full cache, nats per answer token", 3, False),
    "same": ("same first choice as the full cache", 3, True),
    "output_error": ("relative error of the attention output, mean over layers", 3, False),
    "accuracy": ("share of right answers, tasks that the full cache solves", 3, True),
}


@dataclass(frozen=True)
class Mean:
    """mean, and half the width of its 95% interval over items (normal approximation; nan for a single item)."""

    mean: float
    half: float
    count: int


def mean_of(values: Sequence[float]) -> Mean:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), 1.96 * error, len(values))


class Report:
    """Of one model and seed. Rows of other ones in the store are left out."""

    def __init__(self, rows: Iterable[Row], model: str, seed: int):
        mine = [row for row in rows if row["model"] == model and row["seed"] == seed]
        self.model, self.seed = model, seed
        self.solved = solved_tasks(mine, model, seed)
        self.rows = [row for row in mine if row["mode"] != "-"]
        self.full_answers = [row for row in mine if row["mode"] == "-"]
        self.policies = list(dict.fromkeys(row["policy"] for row in self.rows if row["policy"] != FULL))
        self.ratios = sorted({row["ratio"] for row in self.rows if row["policy"] != FULL})
        self.tasks = list(dict.fromkeys(row["task"] for row in self.rows))

    def values(self, figure: str, mode: str, policy: str, ratio: float, task: str | None = None) -> dict[tuple, float]:
        """By item. Accuracy counts solved tasks only."""
        found = {}
        for row in self.rows:
            if (row["mode"], row["policy"], row["ratio"]) != (mode, policy, ratio) or row.get(figure) is None:
                continue
            if (task is None or row["task"] == task) and (figure != "accuracy" or self.solved.get(row["task"])):
                found[row["task"], row["index"]] = float(row[figure])
        return found

    def table(self, figure: str, mode: str, task: str | None = None) -> str:
        """Policies down, budgets across; mean ± 95% interval. '' when nothing was measured."""
        title, digits, _ = FIGURES[figure]
        lines = []
        for policy in [FULL, *self.policies]:
            cells = []
            for ratio in self.ratios if policy != FULL else [1.0]:
                values = list(self.values(figure, mode, policy, ratio, task).values())
                cells.append(_cell(mean_of(values), digits) if values else "-")
            cells = cells * len(self.ratios) if policy == FULL else cells
            if any(cell != "-" for cell in cells):
                lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        if len(lines) < 2:
            return ""
        items = len(self.values(figure, mode, self.policies[0], self.ratios[0], task))
        name = f", {task}" if task else ""
        head = f"**{title}; question-{mode}{name}; {items} items**\n\n"
        head += "| policy | " + " | ".join(f"{ratio:g}" for ratio in self.ratios) + " |\n"
        return head + "|---" * (len(self.ratios) + 1) + "|\n" + "\n".join(lines) + "\n"

    def differences(self, figure: str, mode: str, base: str) -> str:
        """Each policy less ``base``, item by item: narrower intervals than two means have."""
        title, digits, _ = FIGURES[figure]
        lines = []
        for policy in self.policies:
            if policy == base:
                continue
            cells = []
            for ratio in self.ratios:
                ours, theirs = (self.values(figure, mode, name, ratio) for name in (policy, base))
                pairs = [ours[item] - theirs[item] for item in ours if item in theirs]
                cells.append(_cell(mean_of(pairs), digits, sign=True) if pairs else "-")
            lines.append(f"| {policy} | " + " | ".join(cells) + " |")
        if not lines or all(line.count(" - ") == len(self.ratios) for line in lines):
            return ""
        head = f"**{title}: difference to {base}, item by item; question-{mode}**\n\n"
        head += "| policy | " + " | ".join(f"{ratio:g}" for ratio in self.ratios) + " |\n"
        return head + "|---" * (len(self.ratios) + 1) + "|\n" + "\n".join(lines) + "\n"

    def counted(self) -> str:
        """Which tasks count, and what the full cache makes of them."""
        lines = []
        for task in dict.fromkeys(row["task"] for row in self.full_answers):
            values = [row["accuracy"] for row in self.full_answers if row["task"] == task]
            verdict = "counts" if self.solved[task] else "does not count"
            lines.append(f"| {task} | {len(values)} | {statistics.fmean(values):.3f} | {verdict} |")
        if not lines:
            return ""
        head = f"**Answers on the full cache; a task counts from {SOLVED:g} on**\n\n"
        head += "| task | items | right | |\n|---|---|---|---|\n"
        return head + "\n".join(lines) + "\n"

    def held(self) -> str:
        """What was really held, read from the scheduler."""
        shares: dict[float, list[float]] = {}
        for row in self.rows:
            if row["policy"] != FULL:
                shares.setdefault(row["ratio"], []).append(row["share"])
        parts = [f"{ratio:g}: {min(each):.4f} to {max(each):.4f}" for ratio, each in sorted(shares.items())]
        return "Share of the entries that was held, by ratio, window and sinks included: " + "; ".join(parts) + ".\n"

    def markdown(self) -> str:
        parts = [f"Model {self.model}, seed {self.seed}. {self.held()}", self.counted()]
        for mode in MODES:
            for figure in FIGURES:
                parts.append(self.table(figure, mode))
            if self.policies:
                parts.append(self.differences("kl", mode, self.policies[0]))
        return "\n".join(part for part in parts if part)

    def write_csv(self, path: Path) -> None:
        """One line for each task, mode, policy and budget."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["model", "seed", "task", "mode", "policy", "ratio", "items", "share held"]
                + [name for figure in FIGURES for name in (figure, f"{figure} +-")]
            )
            for task in self.tasks:
                for mode in MODES:
                    for policy in [FULL, *self.policies]:
                        for ratio in [1.0] if policy == FULL else self.ratios:
                            line = self._line(task, mode, policy, ratio)
                            if line:
                                writer.writerow([self.model, self.seed, task, mode, policy, ratio, *line])

    def _line(self, task: str, mode: str, policy: str, ratio: float) -> list[object]:
        shares = list(self.values("share", mode, policy, ratio, task).values())
        if not shares:
            return []
        line: list[object] = [len(shares), round(statistics.fmean(shares), 5)]
        for figure in FIGURES:
            values = list(self.values(figure, mode, policy, ratio, task).values())
            found = mean_of(values) if values else None
            line += [round(found.mean, 5), round(found.half, 5)] if found else ["", ""]
        return line


def _cell(found: Mean, digits: int, sign: bool = False) -> str:
    mean = f"{found.mean:+.{digits}f}" if sign else f"{found.mean:.{digits}f}"
    return mean if math.isnan(found.half) else f"{mean} ± {found.half:.{digits}f}"
