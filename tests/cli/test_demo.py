"""Starting, waiting for and stopping the demo's server, with small processes in its place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from laprox_sglang import demo


def start(code: str, log) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-u", "-c", code], stdout=file, stderr=file, start_new_session=True)


class Never:
    def is_healthy(self) -> bool:
        return False


class AfterThree:
    calls = 0

    def is_healthy(self) -> bool:
        self.calls += 1
        return self.calls > 3


def test_a_server_that_dies_shows_its_log(tmp_path):
    log = tmp_path / "server.log"
    server = start("print('the reason'); raise SystemExit(7)", log)
    with pytest.raises(demo.DemoError, match=r"(?s)exit code 7.*the reason"):
        demo.wait_until_healthy(Never(), server, log)


def test_waiting_ends_when_it_is_healthy(tmp_path, capsys):
    log = tmp_path / "server.log"
    server = start("import time; time.sleep(60)", log)
    try:
        demo.wait_until_healthy(AfterThree(), server, log)
    finally:
        demo.stop(server)
    assert "Server ready after" in capsys.readouterr().out


def test_stop_ends_children_too(tmp_path, monkeypatch):
    """A child that ignores SIGTERM is ended by force."""
    monkeypatch.setattr(demo, "STOP_SECONDS", 1)
    log = tmp_path / "server.log"
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    server = start(f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {child!r}])", log)
    while "up" not in log.read_text():
        time.sleep(0.05)
    demo.stop(server)
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.killpg(server.pid, 0)
            time.sleep(0.1)


def test_a_used_port_names_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(demo.DemoError, match=f"port {port} .*make serve PORT={port + 1}"):
            demo.check_port(port)
    demo.check_port(demo.free_port())


def test_last_line_of_a_progress_bar(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\n10%\r50%\r90%")
    assert demo.last_line(log) == "90%"
    log.write_text("")
    assert demo.last_line(log) == ""
