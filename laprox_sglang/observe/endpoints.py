"""``/laprox`` and what is below it, for SGLang's own FastAPI app.

They show sizes over all tenants, so they are for those who run the server: its admin key where it has one, else its
key (SGLang's level ``ADMIN_OPTIONAL``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from laprox_sglang.observe import channel, page, schema
from laprox_sglang.observe.live import Feed

# What a scheduler counts beside its work is asked for again until it is there.
AGAIN_SECONDS, PATIENCE_SECONDS = 0.03, 3.0

router = APIRouter(prefix="/laprox", tags=["laprox"])


def _manager() -> Any:
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


feed = Feed(_manager)


async def _ask(response: Response, **query: Any) -> list[dict[str, Any]]:
    """The header ``Server-Timing`` says how long the slowest scheduler was held, in milliseconds."""
    try:
        answers = await channel.ask(_manager(), **query)
    except channel.NoAnswerError as error:
        raise HTTPException(503, str(error)) from None
    held = max(answer["held_scheduler"] for answer in answers)
    response.headers["Server-Timing"] = f"scheduler;dur={1000 * held:.3f}"
    return answers


async def _ask_until(done: Callable[[dict[str, Any]], bool], response: Response, **query: Any) -> list[dict[str, Any]]:
    """Ask again while an answer is incomplete; the incomplete one after ``PATIENCE_SECONDS``."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        answers = await _ask(response, **query)
        if all(done(answer) for answer in answers) or time.monotonic() > deadline:
            return answers
        await asyncio.sleep(AGAIN_SECONDS)


@cache
def _version() -> str:
    return metadata.version("laprox-sglang")


@router.get("", response_class=HTMLResponse, summary="The page")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def show_page() -> HTMLResponse:
    return HTMLResponse(page.html(), headers=page.headers())


@router.get("/stats", response_model=schema.Stats, summary="Counters of the compressed cache")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def stats(response: Response) -> schema.Stats:
    from sglang.srt.runtime_context import get_serving

    answers = await _ask(response, ask="stats")
    return schema.Stats(
        model=str(get_serving().served_model_name).rstrip("/").rsplit("/", 1)[-1],
        version=_version(),
        time=time.time(),
        replicas=[schema.ReplicaStats(replica=answer["replica"], **answer["found"]) for answer in answers],
    )


@router.get("/segments", response_model=schema.Segments, summary="The largest, hottest or newest compressed nodes")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def segments(
    response: Response, order: schema.Order = "largest", limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> schema.Segments:
    def done(answer: dict[str, Any]) -> bool:
        return all(each["kept"] is not None for each in answer["found"]["segments"])

    answers = await _ask_until(done, response, ask="segments", order=order, limit=limit)
    return schema.Segments(
        order=order,
        replicas=[schema.ReplicaSegments(replica=answer["replica"], **answer["found"]) for answer in answers],
    )


# The id is no part of the path: SGLang's request metrics have a label for each path.
@router.get("/segment", response_model=schema.SegmentDetail, summary="One compressed node and which positions survive")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def segment(
    response: Response,
    id: Annotated[int, Query(ge=0)],
    layer: Annotated[int | None, Query(ge=0)] = None,
    head: Annotated[int | None, Query(ge=0)] = None,
    replica: Annotated[int, Query(ge=0)] = 0,
) -> schema.SegmentDetail:
    def done(answer: dict[str, Any]) -> bool:
        found = answer["found"]
        return found is None or (found["strip"] is not None and found["segment"]["kept"] is not None)

    for answer in await _ask_until(done, response, ask="segment", node=id, layer=layer, head=head):
        if answer["replica"] == replica and answer["found"] is not None:
            return schema.SegmentDetail(replica=replica, **answer["found"])
    raise HTTPException(404, f"replica {replica} holds no compressed node {id} (any more), or it has no such list")


@router.get("/conversations", response_model=schema.Conversations, summary="The most recently used paths of the tree")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def conversations(response: Response, limit: Annotated[int, Query(ge=1, le=20)] = 12) -> schema.Conversations:
    answers = await _ask(response, ask="conversations", limit=limit)
    return schema.Conversations(
        replicas=[schema.ReplicaConversations(replica=answer["replica"], **answer["found"]) for answer in answers]
    )


@router.get("/map", response_model=schema.KeptMaps, summary="Kept entries per layer and head over the whole tree")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def kept_map(response: Response) -> schema.KeptMaps:
    answers = await _ask_until(lambda answer: answer["found"]["kept"] is not None, response, ask="map")
    return schema.KeptMaps(
        replicas=[schema.KeptMap(replica=answer["replica"], **answer["found"]) for answer in answers]
    )


@router.get("/history", response_model=schema.History, summary="The cache's size over time and the last compressions")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def history(response: Response) -> schema.History:
    return schema.History(
        replicas=[
            schema.ReplicaHistory(
                replica=answer["replica"],
                samples=answer["found"]["samples"],
                compressions=[
                    schema.Compression(replica=answer["replica"], **each) for each in answer["found"]["compressions"]
                ],
            )
            for answer in await _ask(response, ask="history")
        ]
    )


@router.get("/events", summary="Server-sent events: counters every second, and compressions as they happen")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def events() -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.listen(), media_type="text/event-stream", headers=headers)
