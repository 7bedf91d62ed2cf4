"""Starting, waiting for and stopping the demo's server, with small processes in its place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laprox_sglang import cli, demo


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


@pytest.mark.parametrize("flags", [["--laprox-ratio", "2"], ["--page-size", "16"], ["--plain", "--laprox-sink", "1"]])
def test_bad_flags_are_refused_before_anything_starts(flags, tmp_path, capsys):
    assert cli.main(["demo", "--port", "0", "--output", str(tmp_path / "out"), *flags]) == 2
    assert flags[-2].partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_interrupt_stops_the_server_that_stays_up(tmp_path):
    """The real sequence with small servers in place of SGLang's: start, chat, stay up, SIGINT, gone."""
    program = Path(__file__).with_name("demo_with_fake_server.py")
    root = program.parents[2]
    printed = tmp_path / "printed"
    with printed.open("wb") as file:
        command = [sys.executable, "-u", str(program), str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "PYTHONPATH": str(root)})
    for _ in range(600):
        if "Ctrl-C stops" in printed.read_text() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0, printed.read_text()
    text = printed.read_text()
    assert "chat 2, turn 1" in text and "Ctrl-C stops the server." in text
    server = int((tmp_path / "out" / "server.log").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
