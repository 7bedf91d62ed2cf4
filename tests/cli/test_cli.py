"""The command itself: fast help, clear errors, what the package ships."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from laprox_sglang import cli

ROOT = Path(__file__).resolve().parents[2]


def test_help_is_fast_and_loads_nothing_heavy():
    code = (
        "import sys; from laprox_sglang import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'sglang', 'transformers', 'httpx'} & set(sys.modules)))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("[]"), done.stderr
    for name in ("serve", "chat", "demo-model", "doctor"):
        assert name in done.stdout
    assert time.monotonic() - start < 5  # under 0.2 s alone; other tests may hold the cores


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--laprox-ratio", "0"], "--laprox-ratio 0.0"),
        (["serve", "--laprox-ratio", "0.5", "--laprox-budget-tokens", "5"], "not both"),
        (["serve", "--laprox-config", '{"ration": 1}'], "ration"),
        (["serve", "--plain", "--laprox-window", "5"], "--laprox-window has no meaning with --plain"),
        (["serve", "--page-size", "16"], "--page-size 16"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("laprox-sglang: error: ") and message in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["doctor", "--wrong"], ["chat", "--turns", "0"]])
def test_wrong_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_every_package_is_named_in_pyproject():
    """The list is written out because of kernels/ and patches/: a forgotten package would be missing from a wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for file in (
        *ROOT.glob("laprox_sglang/**/__init__.py"),
        ROOT / "kernels/__init__.py",
        ROOT / "patches/__init__.py",
    ):
        parts = file.parent.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "laprox_sglang" else ("laprox_sglang", *parts)))
    assert found == set(settings["packages"])
