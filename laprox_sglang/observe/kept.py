"""How many entries each (layer, head) holds over all compressed nodes now in the tree, kept up to date."""

from __future__ import annotations

import numpy as np

from laprox_sglang.cache.segment import Segment
from laprox_sglang.cache.stats import Watcher
from laprox_sglang.observe.aside import Aside

# Segments whose counts are fetched from a device at a time.
BATCH = 512


class KeptCounts(Watcher):
    """``[L * H]`` sums. On a CPU they are exact at once; from a device they are fetched when somebody asks."""

    def __init__(self, lists: int, on_host: bool, aside: Aside):
        self._total = np.zeros(lists, dtype=np.int64)
        self._on_host = on_host
        self._aside = aside
        self._pending: dict[int, tuple[Segment, int]] = {}
        self._fetching: tuple[int, list[tuple[Segment, int]]] | None = None
        self._round = 0

    def held(self, segment: Segment, sign: int) -> None:
        if self._on_host:
            self._total += sign * np.diff(segment.indptr.numpy())
            return
        # What came and went before anybody asked needs no fetching; so this never outgrows the tree.
        if sign < 0 and self._pending.pop(id(segment), None) is not None:
            return
        self._pending[id(segment)] = (segment, sign)

    def cleared(self) -> None:
        self._total[:] = 0
        self._pending.clear()
        self._fetching = None

    def total(self) -> np.ndarray | None:
        """``[L * H]`` int64; None while counts are on their way from the device."""
        if self._on_host:
            return self._total
        if self._fetching is None and self._pending:
            keys = list(self._pending)[:BATCH]
            self._round += 1
            self._fetching = (self._round, [self._pending.pop(key) for key in keys])
        if self._fetching is not None:
            number, parts = self._fetching
            fetched = self._aside.ask(("kept", number), lambda: _summed(parts))
            if fetched is None:
                return None
            self._total += fetched
            self._fetching = None
        return None if self._pending else self._total


def _summed(parts: list[tuple[Segment, int]]) -> np.ndarray:
    return sum(sign * np.diff(segment.indptr.cpu().numpy()) for segment, sign in parts)  # type: ignore[return-value]
