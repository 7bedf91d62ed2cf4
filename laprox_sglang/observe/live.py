"""The stream behind ``/laprox/events``: one poll a second while anybody listens, however many do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from laprox_sglang.observe import channel
from laprox_sglang.observe.schema import Compression, Live, ReplicaStats

INTERVAL = 1.0
BACKLOG = 8  # events that a slow listener may lag behind; older ones are dropped


class Feed:
    """``manager`` returns SGLang's tokenizer manager."""

    def __init__(self, manager: Callable[[], Any]):
        self._manager = manager
        self._listeners: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events: ``live`` (``schema.Live``), or ``waiting`` with the reason while no scheduler answers.

        Ends when the server does.
        """
        queue: asyncio.Queue[str] = asyncio.Queue(BACKLOG)
        self._listeners.add(queue)
        try:
            # A browser reconnects by itself after this many milliseconds.
            yield "retry: 2000\n\n"
            # An open stream would keep the HTTP server from ending, which waits for its connections to close.
            while not getattr(self._manager(), "gracefully_exit", False):
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._poll())
                with contextlib.suppress(TimeoutError):
                    yield await asyncio.wait_for(queue.get(), INTERVAL)
        finally:
            self._listeners.discard(queue)

    async def _poll(self) -> None:
        since: dict[str, int] = {}
        while self._listeners:
            started = time.monotonic()
            try:
                answers = await channel.ask(self._manager(), ask="live", since=since)
            except channel.NoAnswerError as error:
                self._send("waiting", str(error))
                await asyncio.sleep(INTERVAL)
                continue
            since = {str(answer["replica"]): answer["found"]["number"] for answer in answers}
            self._send("live", live(answers).model_dump_json())
            await asyncio.sleep(max(0.0, INTERVAL - (time.monotonic() - started)))

    def _send(self, event: str, data: str) -> None:
        for queue in self._listeners:
            if queue.full():
                with contextlib.suppress(asyncio.QueueEmpty):
                    queue.get_nowait()
            queue.put_nowait(f"event: {event}\ndata: {data}\n\n")


def live(answers: list[dict[str, Any]]) -> Live:
    return Live(
        time=time.time(),
        replicas=[ReplicaStats(replica=answer["replica"], **answer["found"]["stats"]) for answer in answers],
        compressions=[
            Compression(replica=answer["replica"], **each)
            for answer in answers
            for each in answer["found"]["compressions"]
        ],
    )
