"""The benchmark's table: medians, ratios in the direction that is better, gaps."""

import csv

from laprox_sglang.bench import report
from laprox_sglang.bench.sizes import WORKLOAD_NAMES, Sizes
from laprox_sglang.bench.workloads import WORKLOADS, tokens

RESULTS = {
    "prefill, s": {"stock": [2.0, 4.0, 3.0], "ours": [1.0, 1.5, 9.0]},
    "decode, tokens/s": {"stock": [10.0], "ours": [30.0]},
    "share, %": {"ours": [2.5]},
}


def test_table_gives_medians_and_how_many_times_better():
    table = report.markdown(RESULTS, ["stock", "ours"], "title")
    assert "| prefill, s (n=3) | 3 | 1.5 (2x) |" in table
    assert "| decode, tokens/s (n=1) | 10 | 30 (3x) |" in table
    assert "| share, % (n=1) | - | 2.5 |" in table


def test_every_sample_is_written(tmp_path):
    report.write(RESULTS, ["stock", "ours"], "title", tmp_path)
    rows = list(csv.reader((tmp_path / "bench.csv").open()))
    assert len(rows) == 1 + 3 + 3 + 1 + 1 + 1
    assert ["prefill, s", "ours", "2", "9.0"] in rows


def test_workloads_are_named_and_their_prompts_differ():
    assert tuple(WORKLOADS) == WORKLOAD_NAMES
    assert tokens(50, 1, Sizes()) == tokens(50, 1, Sizes()) != tokens(50, 2, Sizes())
