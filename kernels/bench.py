"""``laprox-sglang bench-kernels``: the kernels on one GPU, checked first, then decode timed against other kernels.

    python -m laprox_sglang.kernels.bench            # or python -m kernels.bench in a clone: torch and triton suffice
    python -m laprox_sglang.kernels.bench --check    # results only; without a GPU in Triton's interpreter, small sizes

Bytes are those of keys and values, the same for every kernel of a case, so GB/s and shares can be compared directly.
Times are medians with a cold cache (``triton.testing.do_bench``). Nothing is timed when a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

MEAN = 6554  # 5% of 128K
# (lists, batch): on the largest shapes 64 MB and more a layer
TIMED = (("ample", 1), ("ample", 4), ("ample", 16), ("scattered", 4), ("skewed", 4), ("tiny", 64))
TOLERANCES = {"torch.bfloat16": (1e-2, 1e-2), "torch.float16": (2e-3, 2e-3), "torch.float32": (1e-4, 1e-4)}


@dataclass
class Result:
    """One kernel on one case. ``seconds`` and what follows from it are None where nothing was timed."""

    model: str
    lists: str
    batch: int
    kernel: str
    megabytes: float
    error: float | None = None
    passed: bool | None = None
    seconds: float | None = None
    gb_per_s: float | None = None
    share_of_peak: float | None = None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="check results only; without a GPU in Triton's interpreter"
    )
    parser.add_argument("--models", nargs="+", default=None, help="model shapes (default: all three)")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="start nothing new after that (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for bench-kernels.json")


def run(options: argparse.Namespace) -> int:
    """0: all results right. 1: one is wrong. 2: nothing can run here."""
    import torch

    cuda = torch.cuda.is_available()
    if not cuda and not options.check:
        print(
            "No CUDA device: kernels are timed on a GPU only. To check their results here, in Triton's interpreter on "
            "small sizes, add --check.",
            file=sys.stderr,
        )
        return 2
    if not cuda and not _interpret():
        print(
            "Triton was imported before this command could ask for its interpreter: set TRITON_INTERPRET=1",
            file=sys.stderr,
        )
        return 2
    from .bench_checks import check_all
    from .shapes import MODELS

    unknown = [name for name in options.models or () if name not in MODELS]
    if unknown:
        print(f"unknown model {', '.join(unknown)}; choose from {', '.join(MODELS)}", file=sys.stderr)
        return 2
    device = "cuda" if cuda else "cpu"
    started = time.monotonic()
    about = describe(device)
    print(f"device: {about['name']}")
    checks = check_all(device)
    for check in checks:
        print(f"{'ok' if check.passed else 'WRONG':<6}{check.name}  ({check.detail})")
    failed = [check.name for check in checks if not check.passed]
    results: list[Result] = []
    steps: list[Any] = []
    if not options.check and not failed:
        deadline = started + 60 * options.minutes
        models = [MODELS[name] for name in options.models or MODELS]
        results = time_all(models, device, about["peak_gb_per_s"], deadline)
        print(table(results))
        steps = time_compressions(models, device, deadline)
        failed = [f"{each.kernel} on {each.lists}" for each in results if each.passed is False]
    record = {
        "device": about,
        "versions": versions(),
        "checks": [asdict(check) for check in checks],
        "results": [asdict(result) for result in results],
        "compression": [asdict(step) for step in steps],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "bench-kernels.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(checks)} checks, {len(failed)} wrong{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


def _interpret() -> bool:
    """Ask for Triton's interpreter; False when Triton was imported without it."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def describe(device: str) -> dict[str, Any]:
    import torch
    import triton

    if device == "cpu":
        return {"name": "CPU, Triton's interpreter: nothing is timed", "peak_gb_per_s": None}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": properties.total_memory / 1e9,
        "peak_gb_per_s": triton.testing.get_dram_gbps(0),
        "copy_gb_per_s": copy_speed(),
    }


def copy_speed() -> float:
    """GB/s that a plain copy of 1 GB reads and writes: what of the peak can be had at all."""
    import torch
    import triton

    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.nbytes / milliseconds / 1e6


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ("torch", "triton", "flashinfer-python", "sglang"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def time_all(models: list[Any], device: str, peak: float, deadline: float) -> list[Result]:
    from . import bench_cases

    results = []
    for shape in models:
        for lists, batch in TIMED:
            case = bench_cases.make_case(shape, lists, batch, MEAN, device)
            for name, package, make, same_lists in bench_cases.KERNELS:
                result = Result(shape.name, lists, batch, name, case.bytes / 1e6)
                results.append(result)
                if package is not None and importlib.util.find_spec(package) is None:
                    result.note = f"{package} is not installed"
                elif time.monotonic() > deadline:
                    result.note = "not run: out of time (see --minutes)"
                else:
                    _time(result, case, make, same_lists, peak)
                print(line(result), flush=True)
    return results


def time_compressions(models: list[Any], device: str, deadline: float) -> list[Any]:
    from . import bench_compress

    speed = bench_compress.matmul_speed(device)
    print(f"compression; a large matrix product runs at {speed / 1e12:.0f} TFLOP/s here")
    steps = []
    for shape in models:
        if time.monotonic() > deadline or not bench_compress.room_for(shape):
            print(f"{shape.name:<14} not run: out of time or memory")
            continue
        for step in bench_compress.time_compression(shape, device, speed):
            steps.append(step)
            print(bench_compress.line(step), flush=True)
    return steps


def _time(result: Result, case: Any, make: Any, same_lists: bool, peak: float) -> None:
    import triton

    try:
        call = make(case)
        if same_lists:
            result.error, result.passed = compare(call(), case.expected)
            if not result.passed:
                return
        milliseconds = triton.testing.do_bench(call, return_mode="median")
    except Exception as error:  # another project's kernel must not end the benchmark; ours is checked above
        if result.kernel == "ragged_decode":
            raise
        result.note = f"{type(error).__name__}: {str(error)[:100]}"
        return
    result.seconds = milliseconds / 1e3
    result.gb_per_s = case.bytes / result.seconds / 1e9
    result.share_of_peak = result.gb_per_s / peak


def compare(found: Any, expected: Any) -> tuple[float, bool]:
    """(largest difference, whether it is within rounding); NaN where it must not be is wrong."""
    import torch

    relative, absolute = TOLERANCES[str(found.dtype)]
    close = torch.isclose(found.float(), expected.float(), rtol=relative, atol=absolute)
    return float((found.float() - expected.float()).abs().max()), bool(close.all())


HEADER = f"{'model':<14} {'lists':<10} {'batch':>5} {'MB':>8}  {'kernel':<24} {'us':>9} {'GB/s':>7} {'of peak':>8}"


def line(result: Result) -> str:
    head = f"{result.model:<14} {result.lists:<10} {result.batch:>5} {result.megabytes:>8.1f}  {result.kernel:<24}"
    if result.passed is False:
        return f"{head} WRONG (largest difference {result.error:.3g})"
    if result.seconds is None or result.gb_per_s is None or result.share_of_peak is None:
        return f"{head} {result.note}"
    return f"{head} {result.seconds * 1e6:>9.1f} {result.gb_per_s:>7.0f} {result.share_of_peak:>8.1%}"


def table(results: list[Result]) -> str:
    """All results, and how much longer skewed lists take than uniform ones per byte."""
    lines = [HEADER, *map(line, results)]
    speed = {(r.model, r.lists, r.batch): r.gb_per_s for r in results if r.kernel == "ragged_decode" and r.gb_per_s}
    for (model, lists, batch), found in speed.items():
        uniform = speed.get((model, "ample", batch))
        if lists == "skewed" and uniform:
            lines.append(
                f"{model}: skewed lists take {uniform / found:.2f} times as long as uniform ones on equal bytes"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-kernels", description="Check and time the kernels on one GPU.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
