"""``laprox-sglang demo`` (``make serve``): a server in the background, the scripted chat, then the server stays up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from laprox_sglang import demo_model, launcher
from laprox_sglang.chat import scripted
from laprox_sglang.chat.client import Server

START_SECONDS = 600
STOP_SECONDS = 20
LOG_TAIL_LINES = 25


class DemoError(RuntimeError):
    """The demo could not run; the message says why and what to do."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise DemoError(
                f"port {port} cannot be used ({error.strerror}); choose another, such as `make serve PORT={port + 1}`"
            ) from None


def run(flags: Sequence[str], *, port: int, output: Path, once: bool) -> int:
    """Returns the exit code. ``flags`` go to ``laprox-sglang serve``."""
    check_flags(flags)
    port = port or free_port()
    check_port(port)
    if not launcher.any_given(flags, launcher.MODEL_FLAGS):
        flags = ["--model-path", str(demo_model.ensure()), *flags]
    output.mkdir(parents=True, exist_ok=True)
    log = output / "server.log"
    url = f"http://127.0.0.1:{port}"
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started this in the background
        signal.signal(number, _interrupt)
    with log.open("wb") as log_file:
        # Its own session: Ctrl-C reaches this process only, which then stops the server in order.
        server = subprocess.Popen(
            server_command(flags, port),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with Server(url) as client:
            wait_until_healthy(client, server, log)
            code = scripted.run(client, turns=None, picture=output / "chat.svg")
        cache = "" if launcher.PLAIN_FLAG in flags else f"; its cache at {url}/laprox"
        print(f"Server: {url}  (OpenAI API at {url}/v1{cache}; log in {log})")
        if once or code != 0:
            return code
        print(
            f"Chat with it:  {Path(sys.argv[0]).parent / 'laprox-sglang'} chat --url {url}\nCtrl-C stops the server.",
            flush=True,
        )
        server.wait()
        raise DemoError(f"the server ended by itself with exit code {server.returncode}; see {log}")
    except KeyboardInterrupt:
        return 0
    finally:
        stop(server)


def server_command(flags: Sequence[str], port: int) -> list[str]:
    return [sys.executable, "-m", "laprox_sglang.cli", "serve", *flags, "--port", str(port)]


def check_flags(flags: Sequence[str]) -> None:
    """What the server would refuse at once is refused here, where it is read. Raises LaunchError or ConfigError."""
    plain = launcher.PLAIN_FLAG in flags
    launcher.build_arguments([flag for flag in flags if flag != launcher.PLAIN_FLAG], plain=plain, cpu=False)


def wait_until_healthy(client: Server, server: subprocess.Popen[bytes], log: Path) -> None:
    """Show a line that moves until the server answers. Raises DemoError when it ends or takes too long."""
    start = time.monotonic()
    live = sys.stdout.isatty()
    print(f"Starting the server (log in {log}) ...", flush=True)
    shown = 0.0
    while not client.is_healthy():
        elapsed = time.monotonic() - start
        if server.poll() is not None:
            raise DemoError(f"the server ended with exit code {server.returncode} while starting:\n{tail(log)}")
        if elapsed > START_SECONDS:
            raise DemoError(f"the server did not answer within {START_SECONDS} s:\n{tail(log)}")
        if live:
            print(f"\r  {elapsed:4.0f} s  {last_line(log)[:90]:<90}", end="", flush=True)
        elif elapsed - shown >= 10:
            shown = elapsed
            print(f"  {elapsed:4.0f} s  {last_line(log)[:90]}", flush=True)
        time.sleep(0.5)
    print(
        ("\r" + " " * 100 + "\r" if live else "") + f"Server ready after {time.monotonic() - start:.0f} s.\n",
        flush=True,
    )


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def last_line(log: Path) -> str:
    text = tail(log, 1)
    return text.rsplit("\r", 1)[-1].strip()


def stop(server: subprocess.Popen[bytes]) -> None:
    """Stop the server and everything that it started: by itself in order first, then by force."""
    server.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while _group_exists(server):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            return
        time.sleep(0.1)


def _group_exists(server: subprocess.Popen[bytes]) -> bool:
    server.poll()  # reap it, or its group would seem to live on
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
