"""Tells the attention backend each request's path before a batch runs, and compresses finished prompts after it.

Stock inserts a prompt into the tree when its result is processed: under overlap scheduling one decode step later,
which would see the dense cache or not depending on what else was batched. After ``run_batch`` the forward has been
launched, the prompt's tokens are known on the host, and whatever is launched next queues behind: so compression takes
effect before the request's next step, always.

On a GPU this work goes to the stream that the forward was launched on. With overlap scheduling, SGLang lets the
scheduler's stream go on when the forward has read what they share, which is before this work is done; so that mark is
taken back, and the scheduler's stream waits for all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
    with scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext():
        launched = ours.after_batch(batch)
    if launched:
        scheduler.model_worker.last_shared_read_runner.shared_read_done_event = None
    return result
