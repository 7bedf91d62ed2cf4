"""Pictures of a report. Matplotlib is an extra (``pip install 'laprox-sglang[eval]'``); without it there are none."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from laprox_sglang.evaluation.report import FIGURES, Report
from laprox_sglang.evaluation.run import MODES
from laprox_sglang.evaluation.variants import FULL


def write(report: Report, folder: Path) -> list[Path]:
    """Lines over budgets for each figure, and the needle's heat maps. Returns the files; none without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        return []
    return [path for path in [*_lines(report, folder), *_needle_maps(report, folder)] if path is not None]


def _lines(report: Report, folder: Path) -> list[Path | None]:
    return [_line_plot(report, figure, folder / f"{figure}.png") for figure in FIGURES]


def _line_plot(report: Report, figure: str, path: Path) -> Path | None:
    from matplotlib import pyplot

    modes = [mode for mode in MODES if report.table(figure, mode)]
    if not modes:
        return None
    title, _, more = FIGURES[figure]
    canvas, axes = pyplot.subplots(1, len(modes), figsize=(6.4 * len(modes), 5), squeeze=False, sharey=True)
    styles = ["-", "--", ":", "-."]
    for axis, mode in zip(axes[0], modes, strict=True):
        for index, policy in enumerate(report.policies):
            points = [
                (ratio, statistics.fmean(values))
                for ratio in report.ratios
                if (values := list(report.values(figure, mode, policy, ratio).values()))
            ]
            if points:
                axis.plot(*zip(*points, strict=True), styles[index // 10 % 4], marker="o", markersize=3, label=policy)
        full = list(report.values(figure, mode, FULL, 1.0).values())
        if full:
            axis.axhline(statistics.fmean(full), color="grey", linewidth=0.8, label=FULL)
        axis.set_title(f"question-{mode}")
        axis.set_xlabel("share of the entries held")
        axis.set_xscale("log")
        axis.set_xticks(report.ratios, [f"{ratio:g}" for ratio in report.ratios])
        axis.minorticks_off()
    axes[0][0].set_ylabel(title + (" (more is better)" if more else " (less is better)"))
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(canvas, path)


def _needle_maps(report: Report, folder: Path) -> list[Path | None]:
    """One picture for each mode: a map for each policy, depth by length, at the smallest budget but one."""
    if "needle" not in report.tasks or not report.ratios:
        return []
    figure = "accuracy" if report.solved.get("needle") else "kl"
    ratio = report.ratios[min(1, len(report.ratios) - 1)]
    return [_needle_map(report, mode, figure, ratio, folder / f"needle-{mode}.png") for mode in MODES]


def _needle_map(report: Report, mode: str, figure: str, ratio: float, path: Path) -> Path | None:
    from matplotlib import pyplot

    cells: dict[str, dict[tuple[float, int], list[float]]] = {}
    for row in report.rows:
        if (row["task"], row["mode"], row["ratio"]) == ("needle", mode, ratio) and row.get(figure) is not None:
            cells.setdefault(row["policy"], {}).setdefault((row["depth"], row["length"]), []).append(row[figure])
    if not cells:
        return None
    depths = sorted({depth for found in cells.values() for depth, _ in found})
    lengths = sorted({length for found in cells.values() for _, length in found})
    columns = min(4, len(cells))
    rows = -(-len(cells) // columns)
    canvas, axes = pyplot.subplots(rows, columns, figsize=(3 * columns, 2.4 * rows), squeeze=False)
    top = max(statistics.fmean(each) for found in cells.values() for each in found.values())
    image: Any = None
    for axis in axes.flat[len(cells) :]:
        axis.axis("off")
    for axis, (policy, found) in zip(axes.flat, cells.items(), strict=False):
        grid = [
            [statistics.fmean(found[depth, length]) if (depth, length) in found else float("nan") for length in lengths]
            for depth in depths
        ]
        colours = "RdYlGn" if figure == "accuracy" else "RdYlGn_r"
        image = axis.imshow(grid, cmap=colours, vmin=0, vmax=1 if figure == "accuracy" else top, aspect="auto")
        axis.set_title(policy, fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
    canvas.suptitle(f"needle: {FIGURES[figure][0]}\nby depth and length at {ratio:g}, question-{mode}", fontsize=10)
    canvas.colorbar(image, ax=axes, shrink=0.8)
    return _save(canvas, path)


def _save(canvas: Any, path: Path) -> Path:
    from matplotlib import pyplot

    canvas.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(canvas)
    return path
