"""Gives the scheduler one more method for ``Engine.collective_rpc``: the evaluation's commands.

``collective_rpc`` calls a method of the scheduler by name; it is reachable from the process that made the engine only,
not over HTTP. An attribute, so no registry hook applies; nothing runs and nothing is imported before it is called.
"""

from __future__ import annotations

import sys
from typing import Any

SCHEDULER_MODULE = "sglang.srt.managers.scheduler"


def install() -> None:
    """Idempotent. Does nothing in a process that has not imported the scheduler."""
    module = sys.modules.get(SCHEDULER_MODULE)
    if module is not None:
        module.Scheduler.laprox_evaluate = laprox_evaluate


def laprox_evaluate(scheduler: Any, request: str) -> None:
    from laprox_sglang.evaluation.in_scheduler.session import handle

    handle(scheduler, request)
