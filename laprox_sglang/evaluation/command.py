"""The command ``laprox-sglang eval``: several policies and budgets in one call, with progress, tables and plots."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

TASK_NAMES = (
    "needle",
    "multikey",
    "multivalue",
    "multiquery",
    "tracking",
    "common",
    "frequent",
    "lookup",
    "talk",
    "quote",
    "text",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from laprox_sglang.policy.presets import PRESETS

    parser.add_argument("--model-path", default=None, help="model folder or name (default: the demo model)")
    parser.add_argument("--tasks", nargs="+", default=list(TASK_NAMES), choices=TASK_NAMES, metavar="TASK")
    parser.add_argument("--items", type=int, default=5, help="items of each task (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000], help="tokens of documents, in turn")
    parser.add_argument("--policies", nargs="+", default=None, metavar="POLICY", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--scores", nargs="+", default=None, help="with --allocations: a grid instead of policies")
    parser.add_argument("--allocations", nargs="+", default=None)
    parser.add_argument("--pool-kernels", type=int, nargs="+", default=[21], help="of the grid (default: %(default)s)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.1, 0.2, 0.5], help="default: %(default)s")
    parser.add_argument("--modes", nargs="+", default=["aware", "agnostic"], choices=("aware", "agnostic"))
    parser.add_argument(
        "--answers",
        default="solved",
        choices=("solved", "all", "none"),
        help="which tasks the policies answer: those that the full cache solves, all, or none (default: %(default)s)",
    )
    parser.add_argument("--errors", action="store_true", help="also the error of each layer's attention output")
    parser.add_argument("--longbench", type=Path, default=None, help="folder with LongBench's JSONL files")
    parser.add_argument("--infinitebench", type=Path, default=None, help="folder with InfiniteBench's JSONL files")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files (default: Python's documentation)")
    parser.add_argument("--profile", default=None, help="profile of head shares, for the policy headkv")
    parser.add_argument("--seed", type=int, default=0, help="of the generated tasks (default: %(default)s)")
    parser.add_argument("--pool-tokens", type=int, default=65536, help="slots of the KV pool (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after about so long; call again to go on"
    )
    parser.add_argument("--output", type=Path, default=Path("out/eval"), help="folder for rows, tables and plots")


def run(options: argparse.Namespace) -> int:
    """Returns 0 when all is measured, 3 when time was up and another call goes on."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    from laprox_sglang import demo_model
    from laprox_sglang.evaluation.engine import EvaluationEngine
    from laprox_sglang.evaluation.items import tokenise
    from laprox_sglang.evaluation.run import Plan, Runner
    from laprox_sglang.evaluation.store import Store

    model = options.model_path or str(demo_model.ensure())
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = _items(options, tokenizer)
    name = Path(model).name
    plan = Plan(
        name,
        options.seed,
        items,
        _variants(options),
        options.modes,
        options.answers,
        options.errors,
        options.seconds,
    )
    store = Store(options.output)
    longest = max(len(tokenise(item, tokenizer).all) + item.new_tokens for item in items)
    with tqdm(total=len(items), unit="item") as bar:

        def start() -> EvaluationEngine:
            return EvaluationEngine(model, pool_tokens=options.pool_tokens, max_tokens=longest)

        def progress(what: str, done: int) -> None:
            bar.set_description(what)
            bar.update(done)

        runner = Runner(start, tokenizer, store, plan, progress)
        try:
            complete = runner.run()
        finally:
            runner.close()
    print(write_report(store, plan, options.output))
    return 0 if complete else 3


def write_report(store: Any, plan: Any, folder: Path) -> str:
    """Tables and plots of what the store holds of this plan; returns the tables."""
    from laprox_sglang.evaluation import benchmarks, plots
    from laprox_sglang.evaluation.report import Report
    from laprox_sglang.evaluation.variants import full

    variants = {(each.name, each.ratio) for each in [full(), *plan.variants]}
    items = {(item.task, item.index, item.meta.get("length")) for item in plan.items}
    rows = [
        row
        for row in store.rows
        if (row["policy"], row["ratio"]) in variants and (row["task"], row["index"], row["length"]) in items
    ]
    report = Report(rows, plan.model, plan.seed)
    text = report.markdown() + benchmarks.tables(report)
    (folder / "eval.md").write_text(text)
    report.write_csv(folder / "eval.csv")
    plots.write(report, folder)
    return text


def _items(options: argparse.Namespace, tokenizer: Any) -> list[Any]:
    from laprox_sglang.evaluation import benchmarks
    from laprox_sglang.evaluation.tasks import generate

    if options.longbench or options.infinitebench:
        limit = max(options.lengths)
        items = benchmarks.longbench(options.longbench, options.items, tokenizer, limit) if options.longbench else []
        if options.infinitebench:
            items += benchmarks.infinitebench(options.infinitebench, options.items, tokenizer, limit)
        return items
    by_task = [
        generate(task, tokenizer, options.lengths, options.items, options.seed, options.text) for task in options.tasks
    ]
    # Task by task in turn, so that a run which is cut short has something of each.
    return [item for group in zip(*by_task, strict=True) for item in group]


def _variants(options: argparse.Namespace) -> list[Any]:
    from laprox_sglang.evaluation.variants import of_grid, of_policies
    from laprox_sglang.policy.presets import PRESETS

    found = []
    if options.scores or options.allocations:
        scores, allocations = options.scores or ["laprox"], options.allocations or ["model"]
        found = of_grid(scores, allocations, options.pool_kernels, options.ratios)
    if options.policies or not found:
        found += of_policies(options.policies or PRESETS, options.ratios, options.profile)
    return found
