"""`laprox-sglang demo` with a pretended server, as a program that can be interrupted. Argument: the output folder."""

from __future__ import annotations

import sys
from pathlib import Path

from laprox_sglang import demo
from tests.cli.fake_server import FakeServer

fake = FakeServer()
demo.check_port = lambda port: None  # the pretended server holds it already
code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
demo.server_command = lambda flags, port: [sys.executable, "-c", code]
port = int(fake.url.rsplit(":", 1)[1])
sys.exit(demo.run(["--model-path", "tiny"], port=port, output=Path(sys.argv[1]), once=False))
