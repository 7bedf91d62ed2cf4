"""The columns of a comparison: which server is started, with which flags."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 900


@dataclass(frozen=True)
class Column:
    """One server of a comparison. ``flags`` go to ``laprox-sglang serve``."""

    name: str
    flags: tuple[str, ...]


def columns(ratio: float) -> tuple[Column, ...]:
    """Stock as people run it here, ours with everything kept, ours compressing."""
    return (
        Column("stock", ("--plain",)),
        Column("ours, ratio 1", ("--laprox-ratio", "1")),
        Column(f"ours, ratio {ratio:g}", ("--laprox-ratio", f"{ratio:g}")),
    )


class RunningServer:
    """A started server and its HTTP client."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process = process
        self.log = log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600, trust_env=False)

    def generate(self, tokens: Sequence[int], new_tokens: int) -> dict[str, Any]:
        reply = self.client.post("/generate", json=self.body(tokens, new_tokens))
        reply.raise_for_status()
        return reply.json()

    @staticmethod
    def body(tokens: Sequence[int], new_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return {"input_ids": list(tokens), "sampling_params": sampling}

    def state(self) -> dict[str, Any]:
        """The ``laprox`` block of ``/server_info``; empty for a plain server."""
        return self.client.get("/server_info").json()["internal_states"][0].get("laprox", {})

    def flush(self) -> None:
        for _ in range(100):
            if self.client.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.1)
        raise RuntimeError("the server did not flush its cache: requests are still running")


@contextlib.contextmanager
def running(column: Column, model: str | None, extra: Sequence[str], log: Path) -> Iterator[RunningServer]:
    """Start the column's server on a free port, wait until it answers, stop it at the end.

    Raises RuntimeError with the end of the log when it does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "laprox_sglang.cli", "serve", *column.flags, "--port", str(port), *extra]
    command += ["--model-path", model] if model else []
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ), start_new_session=True
        )
    server = RunningServer(process, port, log)
    try:
        _wait(server)
        yield server
    finally:
        server.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Below the range that the kernel gives out by itself: the server binds it only after it has loaded the model."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _wait(server: RunningServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {server.log.read_text(errors='replace')[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if server.client.get("/health_generate").status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"no server after {START_SECONDS} s, see {server.log}")
