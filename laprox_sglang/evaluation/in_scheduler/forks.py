"""Compressed copies of a dense document: scored and selected by the server's own compressor, packed into new slots."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from laprox_sglang.cache.compressor import Compressor, Scored
from laprox_sglang.cache.laprox_cache import LaProxRadixCache
from laprox_sglang.cache.node import LaProxNode
from laprox_sglang.cache.segment import Segment
from laprox_sglang.cache.stats import PROMPT
from laprox_sglang.cache.tree import Stretch
from laprox_sglang.config import LaProxConfig
from laprox_sglang.policy.registry import get_allocation, get_score
from laprox_sglang.policy.scores.parts import pool
from laprox_sglang.policy.select import Selection

# Queries that are scored at once where a score reads all of them.
_QUERIES = 256


@dataclass(frozen=True)
class _Dense:
    """A stretch of the document as ``Compressor.scores`` reads nodes: its slots, and that it is not compressed."""

    value: Tensor
    segment: None = None

    @property
    def tokens(self) -> int:
        return self.value.shape[0]


class _Path:
    """Stands for the tree: one path of dense nodes, whatever node is asked for."""

    def __init__(self, nodes: list[_Dense]):
        self.nodes = nodes

    def path(self, node: object) -> list[tuple[_Dense, int]]:
        placed, start = [], 0
        for each in self.nodes:
            placed.append((each, start))
            start += each.tokens
        return placed


class _Queries:
    """Stands for the ring: all the document's queries, ``[n, Hq, D]`` of each layer."""

    def __init__(self, queries: list[Tensor]):
        self.queries = queries

    def read(self, row: object, end: int, count: int) -> Tensor:
        return torch.stack([layer[end - count : end] for layer in self.queries])


@dataclass(frozen=True)
class Fork:
    """One policy's copy. ``prefix`` tokens of the document: ``stretch`` compressed ones and then the dense window.

    entries: what the copy holds, the window's included, counted in (layer, KV head, token).
    """

    salt: str
    prefix: int
    stretch: int
    selection: Selection
    slots: int
    entries: int


class Forks:
    """Makes copies of one document. ``slots`` [n] are the dense document's, ``queries`` all its layers' queries."""

    def __init__(self, base: Compressor, tree: LaProxRadixCache, slots: Tensor, queries: list[Tensor], output: Tensor):
        self.base = base
        self.tree = tree
        self.pool = tree.pool
        self.slots = slots
        self.ring: Any = _Queries(queries)
        self.output = output
        self._scored: dict[tuple[Any, ...], Scored] = {}

    def make(self, salt: str, tokens: list[int], config: LaProxConfig, ratio: float) -> Fork:
        """Copies the first ``len(tokens)`` tokens of the document under ``salt``.

        The copy holds ``ratio`` of the tokens' entries, rounded up to a slot, window and sinks included. Its last token
        is left out, so that a request which ends there computes it on the compressed cache.
        Raises ValueError when the window alone is more than that, or when the pool is full.
        """
        prefix, window = len(tokens), config.window
        stretch = prefix - window
        slots = _ceil(prefix * ratio) - window
        if stretch < 1 or slots < max(1, config.sink):
            raise ValueError(
                f"ratio {ratio:g} of {prefix} tokens does not hold the window of {window} and {config.sink} sinks; use "
                "longer documents, a larger ratio or a smaller window"
            )
        scored, compressor = self._score(prefix, config)
        budget = min(slots, stretch) * self.pool.rows_per_slot
        whole = Stretch(_REQUEST, _Dense(self.slots[:stretch]), 0, prefix, 0, budget)  # type: ignore[arg-type]
        selection = compressor.select(scored, whole, get_allocation(config.allocation, config.profile), budget)
        kept = selection.positions.shape[0]
        self._graft(salt, tokens, stretch, selection)
        rows = self.pool.rows_per_slot
        return Fork(salt, prefix, stretch, selection, self.pool.slots_for(kept) + window, kept + window * rows)

    def scored(self, prefix: int, config: LaProxConfig) -> Scored:
        """Scores of the first ``prefix`` tokens, by the window before their end."""
        return self._score(prefix, config)[0]

    def _score(self, prefix: int, config: LaProxConfig) -> tuple[Scored, Compressor]:
        """Scores do not depend on budget or allocation, but for a layer's weights."""
        weighs = "cake" if config.allocation == "cake" else "head"
        key = (prefix, config.score, weighs, config.window, config.pool_kernel, config.gqa, config.sink)
        compressor = self._compressor(replace(config, allocation=weighs, profile=None, min_tokens=config.window))
        if key not in self._scored:
            one = get_score(config.score).every_query
            self._scored[key] = self._every_query(prefix, config) if one else self._window(prefix, config, compressor)
        return self._scored[key], compressor

    def _compressor(self, config: LaProxConfig) -> Compressor:
        base = self.base
        return Compressor(
            config, self.pool, self.ring, base.attention, base.projection, base.scales, base.caps, self.output
        )

    def _window(self, prefix: int, config: LaProxConfig, compressor: Compressor) -> Scored:
        stretch = prefix - config.window
        nodes = [_Dense(self.slots[:stretch]), _Dense(self.slots[stretch:prefix])]
        compressor.tree = _Path(nodes)  # type: ignore[assignment]
        return compressor.scores(Stretch(_REQUEST, nodes[0], 0, prefix, 0, 0))  # type: ignore[arg-type]

    def _every_query(self, prefix: int, config: LaProxConfig) -> Scored:
        """The sum over all queries, a part of them at a time, each over the tokens that it can see."""
        plain = replace(config, allocation="head", profile=None, window=_QUERIES, min_tokens=_QUERIES, pool_kernel=1)
        compressor = self._compressor(plain)
        total = torch.zeros((self.pool.layers, self.pool.heads, prefix), device=self.pool.device)
        for end in range(_QUERIES, prefix + _QUERIES, _QUERIES):
            start, end = end - _QUERIES, min(end, prefix)
            node = _Dense(self.slots[:end])
            compressor.tree = _Path([node])  # type: ignore[assignment]
            part = compressor.scores(Stretch(_REQUEST, node, 0, end, start, 0))  # type: ignore[arg-type]
            total[:, :, :end] += part.scores
        return Scored(pool(total, config.pool_kernel), prefix - config.window)

    def _graft(self, salt: str, tokens: list[int], stretch: int, selection: Selection) -> None:
        """Two nodes under the root: the kept entries, and the window without its last token, dense.

        Ownership: their slots are new; the tree owns them, the document's stay as they are.
        """
        tree, pool, kept = self.tree, self.pool, selection.positions.shape[0]
        packed, dense = self._alloc(pool.slots_for(kept)), self._alloc(len(tokens) - 1 - stretch)
        lists = torch.repeat_interleave(
            torch.arange(pool.rows_per_slot, device=pool.device), selection.indptr.long().diff(), output_size=kept
        )
        target = pool.packed_rows(packed, kept)
        pool.move(pool.own_rows(lists, self.slots[selection.positions.long()]), target)
        segment = Segment(stretch, packed, target, selection.indptr.long(), selection.positions)
        source = self.slots[stretch : len(tokens) - 1]
        for buffer in (pool.k, pool.v):
            buffer[:, dense] = buffer[:, source]
        key = RadixKey(array("q", tokens[:-1]), cache_salt=salt)
        node = self._adopt(tree.root_node, key[:stretch], torch.zeros_like(self.slots[:stretch]), segment)
        freed = stretch - len(packed)
        tree.stats.compressed(node.id, PROMPT, 0, segment, freed, pool.rows_per_slot)
        if len(dense):
            self._adopt(node, key[stretch:], dense, None)

    def _adopt(self, parent: Any, key: RadixKey, value: Tensor, segment: Segment | None) -> LaProxNode:
        tree, node = self.tree, LaProxNode()
        node.parent, node.key, node.value, node.segment = parent, key, value, segment
        parent.children[key.child_key()] = node
        tree.evictable_size_ += node.slots_held
        tree._update_leaf_status(parent)
        tree._update_leaf_status(node)
        return node

    def _alloc(self, count: int) -> Tensor:
        """Raises ValueError when even evicting other copies does not make room."""
        allocator = self.tree.token_to_kv_pool_allocator
        missing = count - allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        slots = allocator.alloc(count)
        if slots is None:
            raise ValueError(f"no {count} slots are left in the KV pool; give --max-total-tokens")
        return slots


_REQUEST = SimpleNamespace(last_node=None, kv=SimpleNamespace(req_pool_idx=0))


def _ceil(x: float) -> int:
    return int(-(-(x - 1e-9) // 1))
