"""``laprox-sglang serve``: SGLang's own server with this package's flags and defaults that fit the machine.

The user's SGLang flags are passed on as they are. What LaProx requires is added when missing and refused when it
contradicts; machine defaults give way to whatever the user says.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable, Sequence

from laprox_sglang import config

# What the compressed cache needs, as (flag, value).
REQUIRED_FLAGS = (
    ("--attention-backend", config.BACKEND_NAME),
    ("--radix-cache-backend", config.BACKEND_NAME),
    ("--page-size", "1"),
)
# Flags that contradict those by another name.
CONFLICTING_FLAGS = {
    "--prefill-attention-backend": "prefill and decode both use the laprox backend",
    "--decode-attention-backend": "prefill and decode both use the laprox backend",
    "--disable-radix-cache": "compressed prefixes live in the radix cache",
}
# Graphs of prefills would not see compressed rows; those of decode steps have to be asked for (see refused.py).
PREFILL_GRAPH_FLAG, DECODE_GRAPH_FLAG = "--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"
# A configuration file may name the model.
MODEL_FLAGS = ("--model-path", "--model", "--config")
# What SGLang's own defaults do not fit on a CPU: (flag, value or None for a switch, flags that replace it).
CPU_FLAGS: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("--device", "cpu", ()),
    # The KV pool comes out of main memory, which SGLang would otherwise fill.
    ("--max-total-tokens", "65536", ("--mem-fraction-static",)),
    ("--max-running-requests", "16", ()),
    # torch_native computes a full-length query for every chunk, so small chunks cost a lot there.
    ("--chunked-prefill-size", "8192", ()),
    # The idle scheduler would take a whole core from everything else on the machine.
    ("--sleep-on-idle", None, ()),
    ("--attention-backend", "torch_native", ()),
)
PLAIN_FLAG = "--plain"


class LaunchError(ValueError):
    """The server cannot be started as asked; the message says why and what to do."""


def given_value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of ``flag`` in ``--flag value`` or ``--flag=value`` form; '' for a switch, None when absent."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == flag:
            following = arguments[position + 1 : position + 2]
            value = following[0] if following and not following[0].startswith("--") else ""
        elif argument.startswith(flag + "="):
            value = argument[len(flag) + 1 :]
    return value


def any_given(arguments: Sequence[str], flags: Iterable[str]) -> bool:
    return any(given_value(arguments, flag) is not None for flag in flags)


def build_arguments(arguments: Sequence[str], *, plain: bool, cpu: bool) -> list[str]:
    """The user's arguments, completed. ``plain`` leaves LaProx out; ``cpu`` says that there is no CUDA device.

    Raises LaunchError or config.ConfigError. A model path is not added here.
    """
    argv, settings = list(arguments), None
    if argv and not argv[0].startswith("-"):  # as `sglang serve MODEL` allows
        argv.insert(0, "--model-path")
    if plain:
        _refuse_laprox_flags(argv)
    else:
        settings = check_settings(argv)
        argv += _missing_requirements(argv)
    if cpu:
        for flag, value, replacements in CPU_FLAGS:
            if not any_given(argv, (flag, *replacements)):
                argv += [flag] if value is None else [flag, value]
    elif not plain:
        recorded = settings is not None and settings.cuda_graphs == "decode"
        flags = (PREFILL_GRAPH_FLAG,) if recorded else (DECODE_GRAPH_FLAG, PREFILL_GRAPH_FLAG)
        argv += [flag for flag in flags if not any_given(argv, (flag,))]
    if not any_given(argv, ("--enable-cache-report",)):
        argv.append("--enable-cache-report")  # chat clients show how much of a prompt was cached
    return argv


def check_settings(arguments: Sequence[str]) -> config.LaProxConfig | None:
    """The ``--laprox-*`` settings, None without any. Raises ConfigError now rather than after SGLang was imported."""
    if os.environ.get(config.ENABLE_VARIABLE, "1").strip().lower() in ("0", "false", "off", "no"):
        raise LaunchError(f"{config.ENABLE_VARIABLE} switches LaProx off; unset it, or pass {PLAIN_FLAG}")
    parser = argparse.ArgumentParser(prog="laprox-sglang serve", add_help=False, allow_abbrev=False)
    config.add_flags(parser)
    values, _ = parser.parse_known_args(list(arguments))
    return config.from_arguments(vars(values))


def _missing_requirements(arguments: Sequence[str]) -> list[str]:
    for flag, reason in CONFLICTING_FLAGS.items():
        if given_value(arguments, flag) is not None:
            raise LaunchError(
                f"{flag} cannot be used with LaProx ({reason}); drop it, or pass {PLAIN_FLAG} for stock SGLang"
            )
    missing: list[str] = []
    for flag, value in REQUIRED_FLAGS:
        given = given_value(arguments, flag)
        if given is None:
            missing += [flag, value]
        elif given != value:
            raise LaunchError(
                f"{flag} {given} cannot be used with LaProx, which needs {flag} {value}; drop it, or pass {PLAIN_FLAG} "
                "for stock SGLang"
            )
    return missing


def _refuse_laprox_flags(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith("--laprox-"):
            raise LaunchError(f"{argument.partition('=')[0]} has no meaning with {PLAIN_FLAG}; drop one of the two")


def serve(arguments: Sequence[str], *, plain: bool = False) -> None:
    """Run the server in this process until it is stopped."""
    from laprox_sglang import cpu_engine

    cpu = not cpu_engine.has_cuda_device()
    if "-h" in arguments or "--help" in arguments:
        argv = ["--help"]
    else:
        argv = build_arguments(arguments, plain=plain, cpu=cpu)
        if not any_given(argv, MODEL_FLAGS):
            from laprox_sglang import demo_model

            argv = ["--model-path", str(demo_model.ensure()), *argv]
        check_port(argv)
    if cpu:
        cpu_engine.enable()
    run_sglang(argv)


def check_port(arguments: Sequence[str]) -> None:
    """Raises LaunchError when another program listens there: SGLang would notice only after it has loaded the model."""
    host = given_value(arguments, "--host") or "127.0.0.1"
    port = given_value(arguments, "--port") or "30000"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise LaunchError(f"cannot listen on {host}, port {port} ({error}); choose another with --port") from None


def run_sglang(argv: Sequence[str]) -> None:
    """What ``sglang serve`` does for a language model."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(list(argv)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
