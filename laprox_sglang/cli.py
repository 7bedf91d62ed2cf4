"""The command ``laprox-sglang``. Anything heavy is imported only by the subcommand that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "laprox-sglang"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="SGLang with LaProx KV cache compression.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    serve = commands.add_parser("serve", help="run the server", add_help=False)
    serve.add_argument("--plain", action="store_true", help="stock SGLang with the same machine defaults, no LaProx")
    serve.set_defaults(run=run_serve)
    demo = commands.add_parser("demo-model", help="make the demo model's folder and print its path")
    demo.add_argument("--output", type=Path, default=None, help="folder to make (default: in the user's cache folder)")
    demo.add_argument("--quiet", action="store_true", help="no progress bar")
    demo.set_defaults(run=run_demo_model)
    return parser


def run_serve(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang import launcher

    launcher.serve(rest, plain=options.plain)
    return 0


def run_demo_model(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang import demo_model

    print(demo_model.ensure(options.output, progress=not options.quiet))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "serve":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    return int(options.run(options, rest))


if __name__ == "__main__":
    sys.exit(main())
