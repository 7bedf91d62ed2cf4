"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled ahead of time.

Both need a process of their own, because triton decides when it is imported whether it interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


def run(*command, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], env=inherited | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_against_the_references():
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    output = run(
        "-m", "pytest", "-p", "no:cacheprovider", *map(str, sorted(FOLDER.glob("interpreted*.py"))), **environment
    )
    assert " passed" in output and "failed" not in output


def test_compile_for_three_gpus_without_spilling(tmp_path):
    """Decode at production shapes (bf16, D 128, groups of 4 and 8) must keep everything in registers."""
    output = run(str(FOLDER / "compile_all.py"), TRITON_CACHE_DIR=str(tmp_path))
    records = [json.loads(line) for line in output.splitlines()]
    decode = {(r["name"], r["capability"]): r["spilled"] for r in records if r["name"].startswith("decode G=")}
    shapes = [f"decode G={group} D=128" for group in (4, 8)]
    assert all(decode[shape, capability] == 0 for shape in shapes for capability in (80, 90, 100)), records
    assert {r["name"].split()[0] for r in records} == {"decode", "merge", "extend", "lse"}
    assert all(r["spilled"] == 0 for r in records), records
