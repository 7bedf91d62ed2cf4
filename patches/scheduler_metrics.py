"""Adds ``sglang:laprox_*`` to SGLang's metrics, where a scheduler reports any.

Its collector, whose labels ours share, is made before the cache; this is the first step of the scheduler's start after
both exist.
"""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter"
TYPE = "after"
PARAMETERS = ("self",)


def hook(result: None, scheduler: Any) -> None:
    from laprox_sglang import runtime

    ours = runtime.current()
    if ours is not None and scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        ours.observer.add_metrics(scheduler.metrics_collector)
