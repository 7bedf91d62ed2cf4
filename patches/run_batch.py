"""Tells the attention backend each request's path before a batch runs, and compresses finished prompts after it.

Stock inserts a prompt into the tree when its result is processed: under overlap scheduling one decode step later,
which would see the dense cache or not depending on what else was batched. After ``run_batch`` the forward has been
launched, the prompt's tokens are known on the host, and whatever is launched next queues behind: so compression takes
effect before the request's next step, always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
TYPE = "around"
PARAMETERS = ("self", "batch", "pp_proxy_tensors")


def hook(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from laprox_sglang import runtime

    ours = runtime.current()
    if ours is None:
        return original(scheduler, batch, *args, **kwargs)
    ours.before_batch(batch)
    result = original(scheduler, batch, *args, **kwargs)
    with scheduler.forward_stream_ctx:
        ours.after_batch(batch)
    return result
