"""How the HTTP process asks the schedulers: SGLang's internal state request, its request id carrying the question.

``rid`` is a field of every SGLang message that an internal state request does not use. So no message type of our own
has to be known to SGLang's encoders and dispatchers, every data parallel replica is asked, and several HTTP workers
work too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

PREFIX = "laprox:"
ANSWER_SECONDS = 30.0
_numbers = itertools.count(1)


class NoAnswerError(RuntimeError):
    """A scheduler did not answer in time (it is in the middle of something long, or gone), or could not."""


def parse(rid: str | None) -> dict[str, Any] | None:
    """The question in a request id; None for a request that is not ours."""
    if rid is None or not rid.startswith(PREFIX):
        return None
    query: dict[str, Any] = json.loads(rid.removeprefix(PREFIX))
    return query


async def ask(manager: Any, **query: Any) -> list[dict[str, Any]]:
    """Every replica's answer, by replica number; see ``answers.Observer.answer``.

    Args: ``manager`` is SGLang's tokenizer manager; ``query`` has ``ask`` and its arguments. Raises NoAnswerError.
    """
    # SGLang's communicator mixes answers up when a waiting caller is cancelled, so the call itself never is.
    task = asyncio.ensure_future(_ask(manager, query))
    try:
        answers = await asyncio.wait_for(asyncio.shield(task), ANSWER_SECONDS)
    except TimeoutError:
        raise NoAnswerError(f"no answer from the scheduler within {ANSWER_SECONDS:.0f} s") from None
    for answer in answers:
        if answer["error"] is not None:
            raise NoAnswerError(f"replica {answer['replica']} could not answer: {answer['error']}")
    return answers


async def _ask(manager: Any, query: dict[str, Any]) -> list[dict[str, Any]]:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    while True:
        number = next(_numbers)
        rid = PREFIX + json.dumps({"number": number, **query})
        replies = await manager.get_internal_state_communicator(GetInternalStateReq(rid=rid))
        answers = [reply.internal_state for reply in replies]
        # A reply to somebody whose call was cancelled may come first.
        if all(answer.get("number") == number for answer in answers):
            return sorted(answers, key=lambda answer: answer["replica"])
