"""Starts real SGLang servers for the tests, one at a time, and talks to them over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from laprox_sglang.bench.servers import free_port

LAPROX = ("--attention-backend", "laprox", "--radix-cache-backend", "laprox", "--page-size", "1")
STOCK = ("--attention-backend", "torch_native")
COMMON = ("--device", "cpu", "--skip-server-warmup", "--sleep-on-idle", "--random-seed", "1")
# A busy loop checks after every step that each slot has exactly one owner, and dies when one has not.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
BAD_LOG = re.compile(r"[Ll]eak [Dd]etected|Scheduler hit an exception|File \"[^\"]*/laprox_sglang/")


class StartError(RuntimeError):
    """The server process ended before it was ready."""

    def __init__(self, code: int, log: str):
        super().__init__(f"exit code {code}: ...{log[-3000:]}")
        self.code, self.log = code, log


class Server:
    """``with Server(model, *flags) as server``: a server on a free port, killed at the end, its log checked."""

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        tokens: int = 32768,
        requests: int = 16,
        threads: int = 1,
        env: dict | None = None,
    ):
        self.port = free_port()
        self.arguments = ["--model-path", str(model), "--port", str(self.port), *COMMON, *flags]
        self.arguments += ["--max-total-tokens", str(tokens), "--max-running-requests", str(requests)]
        # Threads that wait must not spin: the server's other processes share the cores.
        bound = {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.env = {**os.environ, **STRICT, **bound, **(env or {})}
        self.log_file = Path(tempfile.mkdtemp(prefix="laprox-test-")) / "server.log"
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600, trust_env=False)

    def __enter__(self) -> Server:
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self.arguments],
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartError(self.process.returncode, self.log)
            try:
                if self.client.get("/health").status_code == 200:
                    # The health check itself runs a request, which stays in the cache.
                    self.flush()
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        self._kill()
        raise TimeoutError(f"no server after 300 s: ...{self.log[-3000:]}")

    def __exit__(self, kind, *_) -> None:
        died = self.process.poll()
        self._kill()
        if kind is None:
            assert died is None, f"the server died: {self.log[-3000:]}"
            found = BAD_LOG.search(self.log)
            assert found is None, self.log[max(0, found.start() - 500) : found.start() + 3000]

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()

    @property
    def log(self) -> str:
        text = self.log_file.read_text(errors="replace")
        return "\n".join(
            line for line in text.splitlines() if "server_args=" not in line and "Ignore import" not in line
        )

    def generate(self, prompt: list[int] | str, new_tokens: int = 16, **fields: Any) -> Any:
        """One greedy request through the native API; ``fields`` go into the body (``sampling`` into its parameters)."""
        reply = self.client.post("/generate", json=self.body(prompt, new_tokens, **fields))
        assert reply.status_code == 200, reply.text
        return reply.json()

    @staticmethod
    def body(prompt: list | str, new_tokens: int, **fields: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **fields.pop("sampling", {})}
        name = "text" if isinstance(prompt, str) else "input_ids"
        return {name: prompt, "sampling_params": sampling, **fields}

    def together(self, prompts: list, new_tokens: int = 16, **fields: Any) -> list:
        """Requests that are sent at once, each on a connection of its own."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, new_tokens, **dict(fields)), prompts))

    def laprox(self) -> dict[str, Any]:
        return self.client.get("/server_info").json()["internal_states"][0]["laprox"]

    def idle_slots(self) -> dict[str, Any]:
        """The counters once no request runs any more (a finished request is released a step later)."""
        state = self.laprox()
        for _ in range(50):
            if state["slots_held"] + state["slots_free"] == state["slots_total"]:
                return state
            time.sleep(0.1)
            state = self.laprox()
        raise AssertionError(f"slots without an owner: {state}")

    def flush(self) -> None:
        for _ in range(50):
            if self.client.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the cache could not be flushed")


def cached(reply: dict) -> int:
    return reply["meta_info"]["cached_tokens"]


def peak_while(server: Server, action: Callable[[], object]) -> int:
    """The most slots in use at any moment while ``action`` runs."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            state = server.laprox()
            most = max(most, state["slots_total"] - state["slots_free"])
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        done.set()
        watcher.join()
    return most
