"""The Grafana dashboard asks for metrics that exist, with the labels and suffixes that they have."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest

from laprox_sglang.cache.stats import CacheStats
from laprox_sglang.observe.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "monitoring" / "laprox-dashboard.json"
# SGLang's own that the dashboard shows beside ours.
THEIRS = {"sglang:cached_tokens_total", "sglang:prompt_tokens_total", "sglang:token_usage"}
LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0}


@pytest.fixture
def samples(monkeypatch):
    registry = prometheus_client.CollectorRegistry()
    kinds = {}
    for attribute, kind in (("_gauge_cls", "Gauge"), ("_counter_cls", "Counter"), ("_histogram_cls", "Histogram")):
        made = getattr(prometheus_client, kind)
        kinds[attribute] = lambda made=made, **values: made(registry=registry, **values)
    Metrics(CacheStats(), SimpleNamespace(labels=LABELS, **kinds), rows_per_slot=4)
    return {sample.name: sample.labels for family in registry.collect() for sample in family.samples}


def test_every_query_asks_for_a_metric_that_exists(samples):
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"sglang:\w+", query)}
    assert asked - THEIRS <= samples.keys()
    gauges = {"kept_entries", "saved_slots", "segments"}
    counters = {"dropped_entries_total", "rescore_total", "splits_total"}
    named = {f"sglang:laprox_{name}" for name in gauges | counters} | {"sglang:laprox_compress_seconds_bucket"}
    assert named | {"sglang:laprox_rescore_seconds_bucket"} <= asked
    for query in queries:
        assert set(re.findall(r"(\w+)=~", query)) <= LABELS.keys() and query.count("(") == query.count(")")
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_labels_are_sglangs_and_buckets_are_coarse(samples):
    ours = {name: labels for name, labels in samples.items() if not name.endswith("_created")}
    assert all(labels.items() >= {key: str(value) for key, value in LABELS.items()}.items() for labels in ours.values())
