"""The command ``laprox-sglang``. Anything heavy is imported only by the subcommand that needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from laprox_sglang.bench.command import add_arguments as add_bench_arguments
from laprox_sglang.config import ConfigError
from laprox_sglang.evaluation.command import add_arguments as add_eval_arguments
from laprox_sglang.evaluation.profile import add_arguments as add_profile_arguments
from laprox_sglang.kernels.bench import add_arguments as add_kernel_bench_arguments

PROGRAM = "laprox-sglang"
DEFAULT_URL = "http://127.0.0.1:30000"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="SGLang with LaProx KV cache compression.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    # Its arguments are SGLang's: main() hands them on without parsing.
    commands.add_parser("serve", help="run the server; takes every SGLang flag and --laprox-* (see serve --help)")

    chat = commands.add_parser("chat", help="chat with a running server, by hand or scripted")
    chat.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    chat.add_argument("--api-key", default=None, help="key of a server that was started with one")
    chat.add_argument(
        "--script", action="store_true", help="play a short chat about one long document and print a table"
    )
    chat.add_argument(
        "--turns", type=positive, default=None, help="number of turns (default: 5 scripted, else no limit)"
    )
    chat.add_argument("--document", type=Path, default=None, help="text file to chat about (not with --script)")
    chat.add_argument("--max-tokens", type=positive, default=256, help="longest answer (default: %(default)s)")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    chat.add_argument(
        "--picture", type=Path, default=None, help="with --script: also write the table as an SVG picture"
    )
    chat.set_defaults(run=run_chat)

    demo = commands.add_parser("demo", help="start a server, play the scripted chat against it, leave it up")
    demo.add_argument("--once", action="store_true", help="stop the server after the chat")
    demo.add_argument(
        "--port", type=int, default=30000, help="port of the server; 0 takes a free one (default: %(default)s)"
    )
    demo.add_argument(
        "--output", type=Path, default=Path("out"), help="folder for log and picture (default: %(default)s)"
    )
    demo.set_defaults(run=run_demo, takes_server_flags=True)

    model = commands.add_parser("demo-model", help="make the demo model's folder and print its path")
    model.add_argument("--output", type=Path, default=None, help="folder to make (default: in the user's cache folder)")
    model.add_argument("--quiet", action="store_true", help="no progress bar")
    model.set_defaults(run=run_demo_model)

    bench = commands.add_parser("bench", help="measure stock SGLang, ratio 1 and a ratio of yours in one run")
    add_bench_arguments(bench)
    bench.set_defaults(run=run_bench)

    kernels = commands.add_parser("bench-kernels", help="check and time the attention kernels on a GPU")
    add_kernel_bench_arguments(kernels)
    kernels.set_defaults(run=run_bench_kernels)

    evaluation = commands.add_parser("eval", help="measure how well policies keep a model's answers")
    add_eval_arguments(evaluation)
    evaluation.set_defaults(run=run_eval)

    profile = commands.add_parser("profile", help="measure each head's share of the budget, for the policy headkv")
    add_profile_arguments(profile)
    profile.set_defaults(run=run_profile)

    top = commands.add_parser("top", help="show a running server's cache in the terminal; Ctrl-C ends it")
    top.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    top.add_argument("--api-key", default=None, help="admin key of a server that has one, else its key")
    top.add_argument("--interval", type=float, default=2.0, help="seconds between pictures (default: %(default)s)")
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.set_defaults(run=run_top)

    doctor = commands.add_parser("doctor", help="check versions, hooks, device and model support")
    doctor.add_argument("--model-path", default=None, help="model folder to check (default: none)")
    doctor.set_defaults(run=run_doctor)
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


SERVE_HELP = f"""usage: {PROGRAM} serve [--plain] [--model-path MODEL] [SGLang flags] [--laprox-* flags]

Runs SGLang's server with the compressed cache. Without --model-path it serves the demo model.
  --plain    stock SGLang with the same machine defaults, without LaProx

SGLang's own help follows.
"""


def run_serve(arguments: Sequence[str]) -> int:
    from laprox_sglang import launcher

    if "-h" in arguments or "--help" in arguments:
        print(SERVE_HELP, flush=True)
    plain = launcher.PLAIN_FLAG in arguments
    launcher.serve([each for each in arguments if each != launcher.PLAIN_FLAG], plain=plain)
    return 0


def run_chat(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.chat import interactive, scripted
    from laprox_sglang.chat.client import Server

    with Server(options.url, api_key=options.api_key) as server:
        if options.script:
            return scripted.run(server, turns=options.turns, picture=options.picture)
        return interactive.run(
            server,
            document=options.document,
            turns=options.turns,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )


def run_demo(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang import demo

    return demo.run(rest, port=options.port, output=options.output, once=options.once)


def run_bench(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.bench import command

    return command.run(options)


def run_bench_kernels(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.kernels import bench

    return bench.run(options)


def run_eval(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.evaluation import command

    return command.run(options)


def run_top(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.observe import top

    return top.run(options.url, api_key=options.api_key, interval=options.interval, once=options.once)


def run_profile(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang.evaluation import profile

    return profile.run(options)


def run_demo_model(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang import demo_model

    print(demo_model.ensure(options.output, progress=not options.quiet))
    return 0


def run_doctor(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from laprox_sglang import doctor

    return doctor.run(options.model_path)


def expected_errors() -> tuple[type[Exception], ...]:
    """Errors whose message is meant for the user. Only modules that are already loaded can have raised one."""
    names = {
        "laprox_sglang.chat.client": "ChatError",
        "laprox_sglang.cpu_engine": "CpuEngineError",
        "laprox_sglang.demo": "DemoError",
        "laprox_sglang.demo_model": "DemoModelError",
        "laprox_sglang.evaluation.engine": "EvaluationError",
        "laprox_sglang.launcher": "LaunchError",
        "laprox_sglang.observe.top": "TopError",
    }
    return (
        ConfigError,
        *(getattr(sys.modules[module], name) for module, name in names.items() if module in sys.modules),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if argv[:1] == ["serve"]:
            return run_serve(argv[1:])
        parser = build_parser()
        options, rest = parser.parse_known_args(argv)
        if rest and not getattr(options, "takes_server_flags", False):
            parser.error(f"unknown arguments: {' '.join(rest)}")
        return int(options.run(options, rest))
    except Exception as error:
        if isinstance(error, expected_errors()):
            print(f"{PROGRAM}: error: {error}", file=sys.stderr)
            return 2
        raise
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
