"""Teacher-forced fidelity: compress a prefix, then let the model read on, and compare with nothing dropped.

The prefix is sent first and compressed as any prompt is. Then prefix and continuation are sent together: the
continuation attends to the compressed prefix, and its tokens' log probabilities come back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from laprox_sglang.bench.servers import RunningServer


@dataclass(frozen=True)
class Reading:
    """One document's continuation: log probability of each true token, and the model's own first choice there."""

    logprobs: tuple[float, ...]
    choices: tuple[int, ...]
    held: int


@dataclass(frozen=True)
class Fidelity:
    """Against a server that drops nothing, over all documents.

    Attributes:
        loss: mean increase of the negative log likelihood, nats per token, and ``loss_error`` its standard error over
            documents.
        agreement: share of tokens at which the first choice is the same.
        held: slots held per prefix token, read from the server.
    """

    loss: float
    loss_error: float
    agreement: float
    held: float


def read(server: RunningServer, document: Sequence[int], prefix: int) -> Reading:
    """Raises RuntimeError when the continuation did not run on the cached prefix."""
    server.flush()
    server.generate(document[:prefix], 1)
    held = server.state().get("slots_held", 0)
    body = {
        "input_ids": list(document),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": prefix,
        "top_logprobs_num": 1,
    }
    reply = server.client.post("/generate", json=body)
    reply.raise_for_status()
    meta = reply.json()["meta_info"]
    if meta["cached_tokens"] < prefix - 1:
        raise RuntimeError(f"only {meta['cached_tokens']} of {prefix} prefix tokens were cached")
    tokens = [entry for entry in meta["input_token_logprobs"] if entry[0] is not None]
    firsts = [entry[0][1] for entry in meta["input_top_logprobs"] if entry]
    return Reading(tuple(entry[0] for entry in tokens), tuple(firsts), held)


def compare(found: Sequence[Reading], reference: Sequence[Reading], prefix: int) -> Fidelity:
    losses, same, total = [], 0, 0
    for ours, full in zip(found, reference, strict=True):
        losses.append(statistics.fmean(full.logprobs) - statistics.fmean(ours.logprobs))
        same += sum(a == b for a, b in zip(ours.choices, full.choices, strict=True))
        total += len(full.choices)
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    held = statistics.fmean(reading.held for reading in found) / prefix
    return Fidelity(statistics.fmean(losses), error, same / total, held)
