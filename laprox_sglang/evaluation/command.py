"""The command: several settings in one call, with progress, a table and CSV."""

from __future__ import annotations

import argparse
import csv
import itertools
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", default=None, help="model folder (default: the demo model)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.25, 0.5], help="default: %(default)s")
    parser.add_argument("--pool-kernels", type=int, nargs="+", default=[21], help="default: %(default)s")
    parser.add_argument("--scores", nargs="+", default=["laprox"], help="default: %(default)s")
    parser.add_argument("--allocations", nargs="+", default=["model"], help="default: %(default)s")
    parser.add_argument("--documents", type=int, default=16, help="number of texts (default: %(default)s)")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens that are compressed (default: %(default)s)")
    parser.add_argument("--continuation", type=int, default=200, help="tokens read after them (default: %(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files (default: Python's manual)")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for table, CSV and server logs")


def run(options: argparse.Namespace) -> int:
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from laprox_sglang import demo_model
    from laprox_sglang.bench.servers import Column, running
    from laprox_sglang.evaluation.fidelity import Reading, compare, read
    from laprox_sglang.evaluation.text import documents

    model = options.model_path or str(demo_model.ensure())
    length = options.prefix + options.continuation
    texts = documents(options.text, AutoTokenizer.from_pretrained(model), length, options.documents)
    options.output.mkdir(parents=True, exist_ok=True)
    settings = list(itertools.product(options.scores, options.allocations, options.pool_kernels, options.ratios))
    columns = [Column("full", ("--laprox-ratio", "1"))]
    for score, allocation, kernel, ratio in settings:
        flags = ("--laprox-score", score, "--laprox-allocation", allocation, "--laprox-pool-kernel", str(kernel))
        columns.append(Column(f"{score}/{allocation}/{kernel}/{ratio:g}", (*flags, "--laprox-ratio", f"{ratio:g}")))
    readings: list[list[Reading]] = []
    with tqdm(total=len(columns) * len(texts), unit="text") as bar:
        for column in columns:
            bar.set_description(column.name)
            with running(column, model, [], options.output / "eval.log") as server:
                readings.append([])
                for text in texts:
                    readings[-1].append(read(server, text, options.prefix))
                    bar.update()
    header = ["score", "allocation", "pool kernel", "ratio", "slots held per prefix token", "loss, nats per token"]
    header += ["standard error", "same first choice"]
    rows = []
    for setting, found in zip(settings, readings[1:], strict=True):
        result = compare(found, readings[0], options.prefix)
        figures = (result.held, result.loss, result.loss_error, result.agreement)
        rows.append([*map(str, setting), *(f"{value:.3f}" for value in figures)])
    with (options.output / "eval.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    title = f"{options.documents} texts, {options.prefix} tokens compressed, {options.continuation} read after them"
    (options.output / "eval.md").write_text(f"{title}\n\n{table}\n")
    print(f"{title}\n\n{table}")
    return 0
