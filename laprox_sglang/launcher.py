"""``laprox-sglang serve``: SGLang's own server with this package's flags and defaults that fit the machine.

The user's SGLang flags are passed on as they are. What LaProx requires is added when missing and refused when it
contradicts; machine defaults give way to whatever the user says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from laprox_sglang import config

# What the compressed cache needs, as (flag, value).
REQUIRED_FLAGS = (
    ("--attention-backend", config.BACKEND_NAME),
    ("--radix-cache-backend", config.BACKEND_NAME),
    ("--page-size", "1"),
)
# Other spellings that set one of the same things for a part of the work.
CONFLICTING_FLAGS = {
    "--prefill-attention-backend": "prefill and decode both use the laprox backend",
    "--decode-attention-backend": "prefill and decode both use the laprox backend",
    "--disable-radix-cache": "compressed prefixes live in the radix cache",
}
MODEL_FLAGS = ("--model-path", "--model")
# On a CPU the KV pool comes out of main memory, which SGLang would otherwise fill.
CPU_FLAGS = (
    ("--device", "cpu"),
    ("--max-total-tokens", "65536"),
    ("--max-running-requests", "16"),
    # torch_native computes a full-length query for every chunk, so small chunks cost a lot there.
    ("--chunked-prefill-size", "8192"),
)
CPU_ENVIRONMENT_HELP = "OMP_NUM_THREADS"


class LaunchError(ValueError):
    """The server cannot be started as asked; the message says why and what to do."""


@dataclass(frozen=True)
class Launch:
    """A command line for SGLang and the environment variables it runs under."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def given_value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of ``flag`` in ``--flag value`` or ``--flag=value`` form; '' for a bare flag, None when absent."""
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


def plan(arguments: Sequence[str], *, plain: bool, cpu: bool, cores: int) -> Launch:
    """Complete the user's arguments. ``plain`` leaves LaProx out; ``cpu`` says that there is no CUDA device."""
    argv = list(arguments)
    if plain:
        _refuse_laprox_flags(argv)
    else:
        argv += _required_flags(argv)
    if cpu:
        defaults = [*CPU_FLAGS, ("--attention-backend", "torch_native")]
        argv += [part for flag, value in defaults if given_value(argv, flag) is None for part in (flag, value)]
    if given_value(argv, "--enable-cache-report") is None:
        argv.append("--enable-cache-report")
    return Launch(tuple(argv), cpu_environment(cores) if cpu else {})


def cpu_environment(cores: int) -> dict[str, str]:
    """Threads of the forward pass, and no busy waiting: the server's other processes share the same cores."""
    return {"OMP_NUM_THREADS": str(cores)}


def usable_cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _required_flags(arguments: Sequence[str]) -> list[str]:
    for flag, reason in CONFLICTING_FLAGS.items():
        if given_value(arguments, flag) is not None:
            raise LaunchError(f"{flag} cannot be used with LaProx ({reason}); drop it, or pass --plain for stock SGLang")
    missing: list[str] = []
    for flag, value in REQUIRED_FLAGS:
        given = given_value(arguments, flag)
        if given is None:
            missing += [flag, value]
        elif given != value:
            raise LaunchError(
                f"{flag} {given} cannot be used with LaProx, which needs {flag} {value}; drop it, or pass --plain for "
                "stock SGLang"
            )
    return missing


def _refuse_laprox_flags(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith("--laprox-"):
            raise LaunchError(f"{argument.partition('=')[0]} has no meaning with --plain; drop one of the two")


def serve(arguments: Sequence[str], *, plain: bool = False) -> None:
    """Run the server in this process until it is stopped."""
    from laprox_sglang import cpu_engine, demo_model

    help_wanted = "-h" in arguments or "--help" in arguments
    cpu = not cpu_engine.has_cuda_device()
    launch = plan(arguments, plain=plain, cpu=cpu, cores=usable_cores())
    for name, value in launch.environment.items():
        os.environ.setdefault(name, value)
    argv = list(launch.argv)
    if not help_wanted and not any_given(argv, MODEL_FLAGS):
        argv += ["--model-path", str(demo_model.ensure())]
    if cpu:
        cpu_engine.enable()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
