"""CUDA graphs of decode steps, as far as a CPU can tell. Triton decides when it is imported whether it interprets, so
this needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def test_replays_equal_eager_steps():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("interpreted_graphs.py")),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout
