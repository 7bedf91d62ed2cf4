"""What is measured on one server. Each workload yields samples: (figure, seconds or rate)."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator

from laprox_sglang.bench.servers import RunningServer
from laprox_sglang.bench.sizes import Sizes

Sample = tuple[str, float]


def tokens(length: int, seed: int, sizes: Sizes) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, sizes.vocabulary) for _ in range(length)]


def time_to_first_token(server: RunningServer, prompt: list[int]) -> float:
    """Seconds until the first token arrives, of an answer of two: finishing a request is not part of it."""
    arrivals: list[float] = []
    started = time.perf_counter()
    _stream(server, prompt, 2, arrivals)
    return arrivals[0] - started


def cold_prefill(server: RunningServer, sizes: Sizes) -> Iterator[Sample]:
    """Time to first token of a new prompt, and the share of it that compression takes."""
    for run in range(sizes.runs):
        server.flush()
        before = server.state()
        seconds = time_to_first_token(server, tokens(sizes.prompt, run, sizes))
        yield f"cold prefill of {sizes.prompt} tokens, s", seconds
        if before:
            after = server.state()
            spent = {name: after[name] - before[name] for name in ("compress_seconds", "finish_seconds")}
            share = 100 * spent["compress_seconds"] / seconds
            yield f"compression at prefill end, % of the cold prefill of {sizes.prompt} tokens", share
            yield "compression after the last token of a request, ms", 1000 * spent["finish_seconds"]


def cached_turn(server: RunningServer, sizes: Sizes) -> Iterator[Sample]:
    """Time to first token of a short turn on a long cached history."""
    server.flush()
    history = tokens(sizes.context, 1000, sizes)
    yield f"cold prefill of {sizes.context} tokens, s", time_to_first_token(server, history)
    for run in range(sizes.runs):
        prompt = history + tokens(sizes.turn, 2000 + run, sizes)
        figure = f"time to first token, {sizes.turn}-token turn on {sizes.context} cached tokens, s"
        yield figure, time_to_first_token(server, prompt)


def batch_decode(server: RunningServer, sizes: Sizes) -> Iterator[Sample]:
    """Decode throughput of several requests with long histories: long answers less the same with one token."""
    server.flush()
    histories = [tokens(sizes.context, 3000 + index, sizes) for index in range(sizes.batch)]
    for history in histories:
        server.generate(history, 1)
    for run in range(sizes.runs):
        short, long = (
            _together(server, [history + tokens(4, seed + run, sizes) for history in histories], new_tokens)
            for seed, new_tokens in ((4000, 1), (5000, 1 + sizes.decode))
        )
        rate = sizes.batch * sizes.decode / (long - short)
        yield f"decode at {sizes.context} tokens, batch {sizes.batch}, tokens/s", rate


def _together(server: RunningServer, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds until all requests, sent at once, have ended. Not streamed: with few cores clients would be measured."""
    threads = [threading.Thread(target=server.generate, args=(prompt, new_tokens)) for prompt in prompts]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def _stream(server: RunningServer, prompt: list[int], new_tokens: int, arrivals: list[float]) -> None:
    body = {**server.body(prompt, new_tokens), "stream": True}
    with server.client.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and "meta_info" in json.loads(line[6:]):
                arrivals.append(time.perf_counter())


WORKLOADS = {"prefill": cold_prefill, "turn": cached_turn, "decode": batch_decode}
