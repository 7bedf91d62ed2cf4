"""Adds the ``laprox`` block to the scheduler state that ``/server_info`` shows."""

from __future__ import annotations

from typing import Any

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
TYPE = "after"
PARAMETERS = ("self", "recv_req")


def hook(result: Any, state: Any, recv_req: Any) -> None:
    from laprox_sglang import runtime

    ours = runtime.current()
    if ours is not None:
        result.internal_state["laprox"] = ours.state()
