"""A thread of the scheduler process for what the scheduler must not wait for: counting and copies from the device."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)

RESULTS = 256


class Aside:
    """Results by key, the last ``RESULTS`` of them. ``device`` is where the tensors that are read lie."""

    def __init__(self, device: torch.device, forward_stream: Any = None):
        self._results: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None
        self._forward_stream = forward_stream
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ask(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """The result of ``compute`` for this key; None until it is there. Returns at once.

        ``compute`` runs in the thread, on a stream that waits for what the forward stream has been given so far. It may
        only read tensors that nothing changes, such as a segment's.
        """
        future = self._results.get(key)
        if future is None:
            future = self._submit(compute)
            self._results[key] = future
            while len(self._results) > RESULTS:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        if not future.done():
            return None
        error = future.exception()
        if error is not None:
            logger.warning("laprox: could not count: %s", error)
            del self._results[key]
            return None
        return future.result()

    def _submit(self, compute: Callable[[], Any]) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="laprox-observe")
        stream = self._stream
        if stream is None:
            return self._thread.submit(compute)
        event = (self._forward_stream or torch.cuda.current_stream()).record_event()

        def on_stream() -> Any:
            with torch.cuda.stream(stream):
                stream.wait_event(event)
                return compute()

        return self._thread.submit(on_stream)
