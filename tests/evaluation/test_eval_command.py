"""The command end to end on the demo model: one engine start, and what the harness must be able to show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ARGUMENTS = ["--tasks", "needle", "quote", "--items", "1", "--lengths", "500", "--answers", "all", "--errors"]
# One of each kind: fused, two stages, weighed layers, output projection, all queries, control.
NAMES = ["laprox", "ada-criticalkv", "cake", "defensivekv", "h2o", "random"]
POLICIES = ["--policies", *NAMES, "--ratios", "0.1", "1"]


def evaluate(folder, *more):
    command = [sys.executable, "-m", "laprox_sglang.cli", "eval", *ARGUMENTS, *POLICIES, "--output", str(folder)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, env=environment)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    done = evaluate(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def select(rows, policy, ratio):
    found = [row for row in rows if (row["policy"], row["ratio"]) == (policy, ratio) and row["mode"] != "-"]
    return {(row["task"], row["mode"]): row for row in found}


def test_a_row_names_what_was_measured(result):
    _, _, rows = result
    measured = [row for row in rows if row["mode"] != "-"]
    assert len(measured) == 2 * 2 * (1 + len(NAMES) * 2)
    for row in measured:
        assert {"model", "seed", "task", "mode", "policy", "ratio", "slots", "entries", "share", "loss", "kl"} <= set(
            row
        )


def test_at_ratio_1_every_policy_equals_the_full_cache_exactly(result):
    _, _, rows = result
    full = select(rows, "full", 1.0)
    assert len(full) == 4
    for policy in NAMES:
        for case, row in select(rows, policy, 1.0).items():
            for figure in ("loss", "kl", "same", "entries"):
                assert row[figure] == full[case][figure], (policy, case, figure)
            assert row["output_error"] == 0 and row.get("answer") == full[case].get("answer")
    # The dense document itself is read by another kernel, in bfloat16.
    assert all(abs(row["kl"]) < 0.02 for row in full.values())


def test_the_budget_holds_window_and_sinks(result):
    _, _, rows = result
    for row in rows:
        if row["ratio"] == 0.1:
            assert 0.1 <= row["share"] < 0.1 + 1 / 400


def test_random_loses_clearly(result):
    _, _, rows = result
    full, ours, control = select(rows, "full", 1.0), select(rows, "laprox", 0.1), select(rows, "random", 0.1)
    for case in full:
        assert control[case]["kl"] > full[case]["kl"] + 0.3
    assert sum(row["kl"] for row in control.values()) > sum(row["kl"] for row in ours.values())


def test_what_is_measured_is_not_measured_again(result):
    folder, printed, rows = result
    again = evaluate(folder)
    assert again.returncode == 0 and again.stdout == printed
    assert len((folder / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert "loading" not in again.stderr.lower()
    assert (folder / "eval.md").read_text() and (folder / "eval.csv").read_text().startswith("model,seed,task")
