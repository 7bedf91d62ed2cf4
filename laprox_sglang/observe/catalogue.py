"""Lists of what the tree holds, for people. Each call's work is bounded, however large the tree is."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from laprox_sglang.cache.node import LaProxNode
from laprox_sglang.cache.segment import Segment
from laprox_sglang.cache.tree import RaggedRadixCache
from laprox_sglang.observe.aside import Aside

SCAN = 12_000  # nodes that one listing looks at, the newest ones
DEPTH = 128  # nodes of a path that are walked to find where it begins
STRETCHES = 48  # nodes of a path that are listed, the last ones
BINS = 512  # of a token strip

ORDERS: dict[str, Callable[[LaProxNode], Any]] = {
    "largest": attrgetter("segment.tokens"),
    "hottest": attrgetter("hit_count", "last_access_time"),
    "recent": attrgetter("last_access_time"),
}


class Catalogue:
    """``aside`` counts what would take too long here; ``on_host``: tensors lie in main memory."""

    def __init__(self, tree: RaggedRadixCache, layers: int, heads: int, on_host: bool, aside: Aside):
        self._tree = tree
        self._layers, self._heads = layers, heads
        self._on_host = on_host
        self._aside = aside

    def segments(self, order: str, limit: int) -> dict[str, Any]:
        """The first ``limit`` compressed nodes by ``order``; see ``schema.ReplicaSegments``."""
        nodes = self._newest()
        compressed = [node for node in nodes if node.segment is not None]
        first = heapq.nlargest(limit, compressed, key=ORDERS[order])
        now = time.monotonic()
        return {
            "nodes": len(self._tree.by_id),
            "scanned": len(nodes),
            "segments": [self._segment(node, now) for node in first],
        }

    def segment(self, node_id: int, layer: int | None, head: int | None) -> dict[str, Any] | None:
        """One compressed node with its token strip; None when there is no such node (any more)."""
        node = self._tree.by_id.get(node_id)
        if node is None or node.segment is None:
            return None
        if (layer or 0) >= self._layers or (head or 0) >= self._heads:
            return None
        which = None if layer is None or head is None else layer * self._heads + head
        segment, lists = node.segment, self._layers * self._heads
        key = ("strip", node.id, node.version, which)
        return {
            "segment": self._segment(node, time.monotonic()),
            "layer": layer,
            "head": head,
            "strip": self._aside.ask(key, lambda: strip(segment, lists, which)),
        }

    def conversations(self, limit: int) -> list[dict[str, Any]]:
        """The most recently used paths to a leaf."""
        leaves = [node for node in self._newest() if not node.children]
        now = time.monotonic()
        return [
            self._conversation(leaf, now) for leaf in heapq.nlargest(limit, leaves, key=attrgetter("last_access_time"))
        ]

    def _newest(self) -> list[LaProxNode]:
        return list(islice(reversed(self._tree.by_id.values()), SCAN))

    def _segment(self, node: LaProxNode, now: float) -> dict[str, Any]:
        segment = node.segment
        assert segment is not None
        return {
            "id": node.id,
            "start": self._start(node),
            "tokens": segment.tokens,
            "slots": segment.slots.shape[0],
            "ratio": segment.slots.shape[0] / segment.tokens,
            "hits": node.hit_count,
            "age": now - node.creation_time,
            "idle": now - node.last_access_time,
            "kept": self._kept(node),
        }

    def _kept(self, node: LaProxNode) -> list[list[int]] | None:
        segment = node.segment
        assert segment is not None
        if self._on_host:
            counts = segment.indptr.diff()
        else:
            counts = self._aside.ask(("kept", node.id, node.version), lambda: segment.indptr.diff().cpu())
            if counts is None:
                return None
        kept: list[list[int]] = counts.view(self._layers, self._heads).tolist()
        return kept

    def _start(self, node: LaProxNode) -> int | None:
        start = 0
        for _ in range(DEPTH):
            node = node.parent
            if node is self._tree.root_node:
                return start
            start += node.tokens
        return None

    def _conversation(self, leaf: LaProxNode, now: float) -> dict[str, Any]:
        path = [leaf]
        while path[-1].parent is not self._tree.root_node and len(path) < STRETCHES:
            path.append(path[-1].parent)
        path.reverse()
        first = self._start(path[0]) or 0
        stretches, start = [], first
        for node in path:
            stretches.append(
                {
                    "id": node.id,
                    "kind": kind_of(node),
                    "start": start,
                    "tokens": node.tokens,
                    "slots": node.slots_held,
                    "hits": node.hit_count,
                    "age": now - node.creation_time,
                    "idle": now - node.last_access_time,
                }
            )
            start += node.tokens
        return {
            "id": leaf.id,
            "tokens": start - first,
            "slots": sum(node.slots_held for node in path),
            "idle": now - leaf.last_access_time,
            "stretches": stretches,
            "truncated": path[0].parent is not self._tree.root_node,
        }


def kind_of(node: LaProxNode) -> str:
    if node.segment is not None:
        return "compressed"
    return "dense" if node.held_back is None else "held_back"


def strip(segment: Segment, lists: int, which: int | None) -> dict[str, Any]:
    """Share of kept entries per bin of tokens, over all ``lists`` or in the one list ``which``."""
    width = max(1, -(-segment.tokens // BINS))
    bins = -(-segment.tokens // width)
    positions = segment.positions
    if which is not None:
        bounds = segment.indptr[which : which + 2].tolist()
        positions, lists = positions[bounds[0] : bounds[1]], 1
    counts = (positions // width).bincount(minlength=bins).cpu().numpy()
    sizes = np.full(bins, width)
    sizes[-1] = segment.tokens - width * (bins - 1)
    return {"tokens_per_bin": width, "share": (counts / (sizes * lists)).tolist()}
