"""The channel to the schedulers and the feed of events, over SGLang's own communicator."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GetInternalStateReq

from laprox_sglang.observe import channel, live


class Manager:
    """SGLang's communicator, answered by ``replicas`` schedulers that reply in any order."""

    def __init__(self, answer, replicas: int = 1):
        self.answer, self.replicas = answer, replicas
        self.get_internal_state_communicator = FanOutCommunicator(self.send, replicas)
        self.sent = []

    def auto_create_handle_loop(self):
        pass

    def send(self, request):
        self.sent.append(request)
        query = channel.parse(request.rid)
        for replica in reversed(range(self.replicas)):
            state = {"number": query.pop("number", query.get("number")), "replica": replica, "error": None}
            state |= {"found": self.answer(query, replica), "held_scheduler": 0.0}
            query["number"] = state["number"]
            reply = SimpleNamespace(internal_state=state)
            asyncio.get_running_loop().call_soon(self.get_internal_state_communicator.handle_recv, reply)


def test_every_replica_answers_in_order():
    manager = Manager(lambda query, replica: [query["ask"], replica], replicas=3)
    answers = asyncio.run(channel.ask(manager, ask="stats"))
    assert [answer["found"] for answer in answers] == [["stats", 0], ["stats", 1], ["stats", 2]]
    assert isinstance(manager.sent[0], GetInternalStateReq)


def test_others_requests_are_not_ours():
    assert channel.parse(None) is None and channel.parse("HEALTH_CHECK_1") is None


def test_a_late_reply_to_somebody_else_is_not_taken():
    async def run():
        manager = Manager(lambda query, replica: query["ask"])
        stale = SimpleNamespace(internal_state={"tp_size": 1})
        original = manager.send

        def send(request):
            if len(manager.sent) == 0:
                manager.sent.append(request)
                asyncio.get_running_loop().call_soon(manager.get_internal_state_communicator.handle_recv, stale)
            else:
                original(request)

        manager.get_internal_state_communicator._send = send
        return await channel.ask(manager, ask="stats"), len(manager.sent)

    answers, sent = asyncio.run(run())
    assert answers[0]["found"] == "stats" and sent == 2


def test_no_answer_and_errors_are_told(monkeypatch):
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.05)
    manager = Manager(lambda *_: None)
    manager.get_internal_state_communicator._send = lambda _: None
    with pytest.raises(channel.NoAnswerError, match="no answer"):
        asyncio.run(channel.ask(manager, ask="stats"))

    async def failed(*_):
        return [{"replica": 0, "found": None, "error": "KeyError: 'x'", "held_scheduler": 0.0}]

    monkeypatch.setattr(channel, "_ask", failed)
    with pytest.raises(channel.NoAnswerError, match="KeyError"):
        asyncio.run(channel.ask(None, ask="stats"))


def test_a_stream_ends_with_the_server(monkeypatch):
    """SGLang's flag; uvicorn waits for open connections, so a page left open would keep a stopped server alive."""
    monkeypatch.setattr(live, "INTERVAL", 0.02)

    async def run():
        manager = Manager(lambda *_: {"stats": STATS, "compressions": [], "number": 0})
        stream = live.Feed(lambda: manager).listen()
        for _ in range(3):
            await anext(stream)
        manager.gracefully_exit = True
        return [each async for each in stream]

    assert len(asyncio.run(asyncio.wait_for(run(), 5))) <= 2


STATS = {
    **dict.fromkeys(("policy", "score", "allocation", "kernels", "cuda_graphs"), "x"),
    **dict.fromkeys(
        live.ReplicaStats.model_fields.keys() - {"policy", "score", "allocation", "kernels", "cuda_graphs", "replica"},
        0,
    ),
    "nodes": {"dense": 0, "compressed": 0, "held_back": 0},
    "refused_modes": [],
}
DONE = {"time": 1.0, "kind": "prompt", "node": 1, "start": 0, "tokens": 9, "slots": 3, "freed": 6, "entries": 12}


def test_one_poll_serves_all_listeners_and_stops_with_the_last(monkeypatch):
    monkeypatch.setattr(live, "INTERVAL", 0.02)
    asked = []

    def answer(query, replica):
        asked.append(query["since"])
        number = 4 + len(asked)
        fresh = [{"number": number, **DONE}] if query["since"] else []
        return {"stats": STATS, "compressions": fresh, "number": number}

    async def run():
        manager = Manager(answer)
        feed = live.Feed(lambda: manager)
        first, second = feed.listen(), feed.listen()
        seen = []
        for stream in (first, second):
            assert (await anext(stream)).startswith("retry:")
        seen += [await anext(first) for _ in range(3)]
        seen += [await anext(second) for _ in range(3)]
        await first.aclose()
        await second.aclose()
        polls = len(asked)
        await asyncio.sleep(0.1)
        return seen, polls, len(asked), feed

    seen, polls, later, feed = asyncio.run(run())
    assert seen[:3] == seen[3:] and all(each.startswith("event: live\ndata: ") for each in seen)
    events = [json.loads(each.split("data: ")[1]) for each in seen[:3]]
    assert [[c["number"] for c in each["compressions"]] for each in events] == [[], [6], [7]]
    assert asked[:3] == [{}, {"0": 5}, {"0": 6}]
    assert later - polls <= 1 and not feed._listeners
