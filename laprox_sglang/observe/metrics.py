"""``sglang:laprox_*`` on SGLang's ``/metrics``: its prefix, its labels, its client in multiprocess mode."""

from __future__ import annotations

from typing import Any

from laprox_sglang.cache.segment import Segment
from laprox_sglang.cache.stats import RESCORE, CacheStats, Watcher

SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5)


class Metrics(Watcher):
    """Args: ``collector`` is SGLang's SchedulerMetricsCollector of this process, whose labels are taken over."""

    def __init__(self, stats: CacheStats, collector: Any, rows_per_slot: int):
        # Only now: SGLang sets the multiprocess folder before the first import.
        import prometheus_client

        self._stats = stats
        self._rows_per_slot = rows_per_slot
        labels: dict[str, Any] = collector.labels
        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        counter = getattr(collector, "_counter_cls", None) or prometheus_client.Counter
        histogram = getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram

        def made(kind: Any, name: str, documentation: str, **extra: Any) -> Any:
            metric = kind(name=f"sglang:laprox_{name}", documentation=documentation, labelnames=list(labels), **extra)
            return metric.labels(**labels)

        latest = {"multiprocess_mode": "mostrecent"}
        self._kept = made(
            gauge, "kept_entries", "Entries (layer, kv head, token) that compressed nodes hold now.", **latest
        )
        self._saved = made(
            gauge, "saved_slots", "Slots that the tree's tokens would hold besides, were all dense.", **latest
        )
        self._segments = made(gauge, "segments", "Compressed nodes in the tree.", **latest)
        self._dropped = made(counter, "dropped_entries_total", "Entries that compression dropped.")
        self._rescores = made(counter, "rescore_total", "Compressions of an answer while it was written.")
        self._splits = made(counter, "splits_total", "Compressed nodes that were split.")
        self._compress_seconds = made(
            histogram, "compress_seconds", "Host time of compressing a prompt or a finished request.", buckets=SECONDS
        )
        self._rescore_seconds = made(
            histogram, "rescore_seconds", "Host time of compressing an answer while it was written.", buckets=SECONDS
        )
        self._splits_told = 0
        self.changed()

    def compressed(self, node_id: int, kind: str, start: int, segment: Segment, freed: int) -> None:
        self._dropped.inc(segment.tokens * self._rows_per_slot - segment.entries)
        if kind == RESCORE:
            self._rescores.inc()

    def timed(self, kind: str, seconds: float) -> None:
        (self._rescore_seconds if kind == RESCORE else self._compress_seconds).observe(seconds)

    def changed(self) -> None:
        stats = self._stats
        self._kept.set(stats.segment_entries)
        self._saved.set(stats.slots_saved)
        self._segments.set(stats.segments)
        if stats.splits != self._splits_told:
            self._splits.inc(stats.splits - self._splits_told)
            self._splits_told = stats.splits
