"""Medians of all columns as a Markdown table and as CSV."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

# figure -> column -> samples
Results = dict[str, dict[str, list[float]]]


def is_rate(figure: str) -> bool:
    """Whether more is better."""
    return figure.endswith("/s")


def markdown(results: Results, columns: list[str], title: str) -> str:
    """One row per figure: median, number of samples, and how many times better than the first column."""
    lines = [title, "", "| figure (median of n) | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for figure, by_column in results.items():
        base = by_column.get(columns[0])
        cells = []
        for column in columns:
            samples = by_column.get(column)
            cells.append("-" if not samples else _cell(figure, samples, base if column != columns[0] else None))
        count = max(len(samples) for samples in by_column.values())
        lines.append(f"| {figure} (n={count}) | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(figure: str, samples: list[float], base: list[float] | None) -> str:
    median = statistics.median(samples)
    text = f"{median:.3g}"
    if base:
        times = median / statistics.median(base) if is_rate(figure) else statistics.median(base) / median
        text += f" ({times:.3g}x)"
    return text


def write(results: Results, columns: list[str], title: str, folder: Path) -> str:
    """Write ``bench.md`` and ``bench.csv`` (every sample); returns the table."""
    folder.mkdir(parents=True, exist_ok=True)
    table = markdown(results, columns, title)
    (folder / "bench.md").write_text(table)
    with (folder / "bench.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["figure", "column", "sample", "value"])
        for figure, by_column in results.items():
            for column, samples in by_column.items():
                rows.writerows([figure, column, index, value] for index, value in enumerate(samples))
    return table
