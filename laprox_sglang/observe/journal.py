"""The last compressions, and the cache's size over time. Bounded; written only when something happens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from laprox_sglang.cache.segment import Segment
from laprox_sglang.cache.stats import Watcher

COMPRESSIONS, SAMPLES = 256, 900
# Seconds: samples that lie closer overwrite each other, so SAMPLES cover at least half an hour of work.
SAMPLE_INTERVAL = 2.0


class Journal(Watcher):
    """``held`` returns (slots held, tokens cached) of the tree."""

    def __init__(self, held: Callable[[], tuple[int, int]]):
        self._held = held
        self._compressions: deque[dict[str, Any]] = deque(maxlen=COMPRESSIONS)
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=SAMPLES)
        self.number = 0

    def compressed(self, node_id: int, kind: str, start: int, segment: Segment, freed: int) -> None:
        self.number += 1
        self._compressions.append(
            {
                "number": self.number,
                "time": time.time(),
                "kind": kind,
                "node": node_id,
                "start": start,
                "tokens": segment.tokens,
                "slots": segment.slots.shape[0],
                "freed": freed,
                "entries": segment.entries,
            }
        )

    def changed(self) -> None:
        now = time.time()
        slots, tokens = self._held()
        samples = self._samples
        # The newest sample is always the present state; the one before it stays once it is an interval old.
        if len(samples) > 1 and now - samples[-2][0] < SAMPLE_INTERVAL:
            samples.pop()
        samples.append((now, slots, tokens))

    def since(self, number: int) -> list[dict[str, Any]]:
        """Compressions with a higher number, oldest first; at most ``COMPRESSIONS``."""
        fresh = min(self.number - number, len(self._compressions))
        return [self._compressions[index] for index in range(-fresh, 0)] if fresh > 0 else []

    def samples(self) -> list[dict[str, Any]]:
        return [{"time": moment, "slots": slots, "tokens": tokens} for moment, slots, tokens in self._samples]
