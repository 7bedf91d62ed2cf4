"""The scheduler's side: answers what the HTTP process asks about this replica's cache."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from laprox_sglang.observe.aside import Aside
from laprox_sglang.observe.catalogue import Catalogue
from laprox_sglang.observe.journal import Journal
from laprox_sglang.observe.kept import KeptCounts
from laprox_sglang.observe.metrics import Metrics

if TYPE_CHECKING:
    from laprox_sglang.runtime import Runtime


logger = logging.getLogger(__name__)


class Observer:
    """Built with the runtime; told by its cache from then on. ``replica`` is the data parallel rank."""

    def __init__(self, runtime: Runtime, replica: int = 0, forward_stream: Any = None):
        self._runtime = runtime
        self.replica = replica
        tree, pool = runtime.tree, runtime.pool
        on_host = pool.device.type == "cpu"
        aside = Aside(pool.device, forward_stream)
        self._kept = KeptCounts(pool.rows_per_slot, on_host, aside)
        self._catalogue = Catalogue(tree, pool.layers, pool.heads, on_host, aside)

        def held() -> tuple[int, int]:
            slots = tree.evictable_size() + tree.protected_size()
            return slots, slots + tree.stats.slots_saved

        self._journal = Journal(held)
        tree.stats.watchers += [self._journal, self._kept]

    def add_metrics(self, collector: Any) -> None:
        """``collector``: SGLang's own of this process."""
        tree = self._runtime.tree
        tree.stats.watchers.append(Metrics(tree.stats, collector, self._runtime.pool.rows_per_slot))

    def answer(self, query: dict[str, Any]) -> dict[str, Any]:
        """``query["ask"]`` names one of the methods below, the other items are its arguments.

        ``held_scheduler``: seconds that this took, during which the scheduler did nothing else. An error is answered,
        not raised: a display must not stop a server.
        """
        started = time.perf_counter()
        arguments = dict(query)
        found, error = None, None
        try:
            found = getattr(self, "_ask_" + arguments.pop("ask"))(**arguments)
        except Exception as failure:
            logger.exception("laprox: could not answer %s", query)
            error = f"{type(failure).__name__}: {failure}"
        held = time.perf_counter() - started
        return {"replica": self.replica, "found": found, "error": error, "held_scheduler": held}

    def _ask_stats(self) -> dict[str, Any]:
        return self._runtime.state()

    def _ask_live(self, since: dict[str, int]) -> dict[str, Any]:
        """``since``: by replica, the number of the last compression that is known; none where it is missing."""
        journal = self._journal
        fresh = journal.since(since.get(str(self.replica), journal.number))
        return {"stats": self._runtime.state(), "compressions": fresh, "number": journal.number}

    def _ask_history(self) -> dict[str, Any]:
        return {"samples": self._journal.samples(), "compressions": self._journal.since(0)}

    def _ask_segments(self, order: str, limit: int) -> dict[str, Any]:
        return self._catalogue.segments(order, limit)

    def _ask_segment(self, node: int, layer: int | None, head: int | None) -> dict[str, Any] | None:
        return self._catalogue.segment(node, layer, head)

    def _ask_conversations(self, limit: int) -> dict[str, Any]:
        return {"conversations": self._catalogue.conversations(limit)}

    def _ask_map(self) -> dict[str, Any]:
        pool, total = self._runtime.pool, self._kept.total()
        kept = None if total is None else total.reshape(pool.layers, pool.heads).tolist()
        return {"tokens": self._runtime.tree.stats.segment_tokens, "kept": kept}
