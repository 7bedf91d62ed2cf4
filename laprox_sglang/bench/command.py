"""The command itself: every workload on every column, with progress, and the table at the end."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

from laprox_sglang.bench.sizes import WORKLOAD_NAMES, Sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Sizes()
    parser.add_argument("--model-path", default=None, help="model folder (default: the demo model)")
    parser.add_argument("--ratio", type=float, default=0.1, help="ratio of the last column (default: %(default)s)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOAD_NAMES, default=WORKLOAD_NAMES)
    parser.add_argument("--prompt", type=int, default=defaults.prompt, help="tokens of a cold prompt")
    parser.add_argument("--context", type=int, default=defaults.context, help="tokens of a cached history")
    parser.add_argument("--batch", type=int, default=defaults.batch, help="requests that decode together")
    parser.add_argument("--runs", type=int, default=defaults.runs, help="samples of each figure")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for table, CSV and server logs")
    parser.add_argument("--server-flag", action="append", default=[], help="further SGLang flag, for every column")


def run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from laprox_sglang.bench import report
    from laprox_sglang.bench.servers import columns, running
    from laprox_sglang.bench.workloads import WORKLOADS

    sizes = Sizes(prompt=options.prompt, context=options.context, batch=options.batch, runs=options.runs)
    options.output.mkdir(parents=True, exist_ok=True)
    results: report.Results = {}
    servers = columns(options.ratio)
    with tqdm(total=len(servers) * len(options.workloads), unit="workload") as bar:
        for index, column in enumerate(servers):
            bar.set_description(f"{column.name}: starting")
            log = options.output / f"bench-{index}.log"
            with running(column, options.model_path, options.server_flag, log) as server:
                for name in options.workloads:
                    bar.set_description(f"{column.name}: {name}")
                    for figure, value in WORKLOADS[name](server, sizes):
                        results.setdefault(figure, {}).setdefault(column.name, []).append(value)
                    bar.update()
    title = f"{Path(options.model_path or 'demo model').name} on {platform.machine()}, {platform.node()}"
    print(report.write(results, [column.name for column in servers], title, options.output))
    return 0
