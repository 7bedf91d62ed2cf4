"""Adds the ``laprox`` block to the scheduler state that ``/server_info`` shows, and answers our own endpoints.

Those ask through the same request, see ``observe.channel``; for them stock's state is not gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state"
TYPE = "around"
PARAMETERS = ("self", "recv_req")


def hook(original: Callable[..., Any], controller: Any, recv_req: Any) -> Any:
    from laprox_sglang import runtime
    from laprox_sglang.observe import channel

    ours = runtime.current()
    if ours is None:
        return original(controller, recv_req)
    query = channel.parse(recv_req.rid)
    if query is None:
        result = original(controller, recv_req)
        result.internal_state["laprox"] = ours.state()
        return result
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    number = query.pop("number")
    return GetInternalStateReqOutput(internal_state={"number": number, **ours.observer.answer(query)})
