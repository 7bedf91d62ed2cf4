"""The radix tree of dense and compressed nodes, with all memory counted in slots.

A node's key counts tokens; what is locked, evictable and freed counts slots, so that SGLang's leak check
``available + evictable + protected + uncached == total`` holds exactly.

Ownership: ``checkpoint`` moves the slots of a request's row from the request to a new node; ``compress_node`` gives
the slots that a node no longer needs to the allocator; ``evict`` gives back all of a node's slots.
"""

from __future__ import annotations

import heapq
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from laprox_sglang.cache import segment as segments
from laprox_sglang.cache.node import LaProxNode, joined_key
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.cache.stats import PRESSURE, CacheStats

logger = logging.getLogger(__name__)


@dataclass
class RequestState:
    """What the tree remembers of a request that holds a row; dropped when the row is released.

    Attributes:
        computed_from: first token position that this request computed itself.
        decided: its own tokens before this position have been compressed.
        rescored: how many times its answer was compressed while it was written.
    """

    computed_from: int
    decided: int = 0
    rescored: int = 0

    def __post_init__(self) -> None:
        self.decided = max(self.decided, self.computed_from)


@dataclass(frozen=True)
class Stretch:
    """A dense node that is about to be compressed, as the selector sees it.

    Attributes:
        req: the SGLang request whose window queries score it.
        node: the dense node; ``start`` is the position of its first token.
        end: number of tokens of the request whose KV exists (the queries are the last ones before ``end``).
        computed_from: the request's queries exist from this position on.
        budget: entries to keep, exactly.
    """

    req: Any
    node: LaProxNode
    start: int
    end: int
    computed_from: int
    budget: int

    @property
    def tokens(self) -> int:
        return self.node.tokens


@dataclass
class _Walk:
    """Where a descent ended: ``matched`` tokens down to ``node``; ``blocked`` when a needed split had no slot."""

    node: TreeNode
    matched: int = 0
    values: list[torch.Tensor] = field(default_factory=list)
    blocked: bool = False


class RaggedRadixCache(RadixCache):
    """Structure and accounting. What is compressed, and when, is decided by ``LaProxRadixCache``."""

    def __init__(self, params: CacheInitParams, pool: RowPool):
        self.pool = pool
        self.stats = CacheStats()
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        self.requests: dict[str, RequestState] = {}
        self.held_back: set[LaProxNode] = set()
        # Every node but the root, the newest last: for listings that must not walk the tree.
        self.by_id: dict[int, LaProxNode] = {}
        self.epoch = 0
        self.stats.clear_held()

    # Descent

    def _descend(self, key: RadixKey, priority: int = 0, inserted_len: int | None = None) -> _Walk:
        """Walk down as far as ``key`` goes, splitting the last node where the key leaves it.

        ``inserted_len`` is given by insertions, which raise priorities and count hits.
        """
        now = time.monotonic()
        walk = _Walk(self.root_node)
        self.root_node.last_access_time = now
        while walk.matched < len(key):
            child = walk.node.children.get(key.child_key_at(walk.matched))
            if child is None:
                break
            child.last_access_time = now
            length = child.key.match_at(key, walk.matched)
            if length < len(child.key):
                child = self.split_node(child, length)
                if child is None:
                    walk.blocked = True
                    break
            walk.matched += length
            walk.values.append(child.value)
            walk.node = child
            if inserted_len is not None:
                child.priority = max(child.priority, priority)
                if walk.matched > inserted_len:
                    self._inc_hit_count(child)
        return walk

    def _match_prefix_helper(self, node: TreeNode, key: RadixKey):
        walk = self._descend(key)
        return walk.values, walk.node

    def _insert_helper(self, node, key, value, priority=0, inserted_len=0, owner: str | None = None):
        self.root_node.priority = max(self.root_node.priority, priority or 0)
        walk = self._descend(key, priority or 0, inserted_len)
        if walk.matched == len(key) or walk.blocked:
            return walk.matched, walk.node
        new = LaProxNode(priority=priority or 0, owner=owner)
        new.parent = walk.node
        new.key = key[walk.matched :]
        new.value = value[walk.matched :].clone()
        if len(key) > inserted_len:
            self._inc_hit_count(new)
        walk.node.children[new.key.child_key()] = new
        self.by_id[new.id] = new
        self.evictable_size_ += new.slots_held
        self._update_leaf_status(walk.node)
        self._update_leaf_status(new)
        self.kv_events.record_store(new)
        return walk.matched, new

    # Splits and merges

    def split_node(self, child: LaProxNode, at: int) -> LaProxNode | None:
        """Split at token ``at``: the new parent holds the tokens before it, ``child`` stays and holds the rest.

        Returns the new parent; None when a compressed node needs one more slot and none can be had.
        """
        parent = LaProxNode(priority=child.priority, owner=child.owner)
        if child.segment is not None:
            if not self._split_segment(parent, child, at):
                return None
        else:
            parent.value, child.value = child.value[:at].clone(), child.value[at:].clone()
        self._split_selection(parent, child, at)
        parent.due = child.due
        parent.hit_count = child.hit_count
        parent.last_access_time = child.last_access_time
        parent.creation_time = child.creation_time
        parent.lock_ref = child.lock_ref
        key = child.key
        parent.key, child.key = key[:at], key[at:]
        parent.parent = child.parent
        parent.parent.children[key.child_key()] = parent
        parent.children = {child.key.child_key(): child}
        child.parent = parent
        self.by_id[parent.id] = parent
        child.hash_value = child.event_hash_value = None
        return parent

    def _split_segment(self, parent: LaProxNode, child: LaProxNode, at: int) -> bool:
        whole = child.segment
        assert whole is not None
        extra = None
        if segments.split_needs(self.pool, whole, at):
            extra = self._one_slot(child)
            if extra is None:
                return False
        left, right, freed = segments.split(self.pool, whole, at, extra)
        if freed.numel():
            self.token_to_kv_pool_allocator.free(freed)
        self._account(child, left.slots.shape[0] + right.slots.shape[0] - whole.slots.shape[0])
        parent.segment, child.segment = left, right
        parent.value, child.value = child.value[:at], child.value[at:]
        parent.version = child.version = child.version + 1
        self.epoch += 1
        self.stats.split(whole, left, right)
        return True

    def _split_selection(self, parent: LaProxNode, child: LaProxNode, at: int) -> None:
        if child.held_back is None:
            return
        positions, indptr = child.held_back
        self.release_back(child)
        left = positions < at
        # How many of the entries before each list's start lie left of the split; there may be no entry at all.
        counts = torch.nn.functional.pad(left.cumsum(0), (1, 0))[indptr.long()]
        self.hold_back(parent, positions[left], counts)
        self.hold_back(child, positions[~left] - at, indptr.long() - counts)

    def _one_slot(self, keep: LaProxNode) -> torch.Tensor | None:
        """One slot from the allocator, evicting elsewhere if it is empty; the caller owns it."""
        slot = self.token_to_kv_pool_allocator.alloc(1)
        if slot is None:
            self.inc_lock_ref(keep)
            self.evict(EvictParams(num_tokens=1))
            self.dec_lock_ref(keep)
            slot = self.token_to_kv_pool_allocator.alloc(1)
        return slot

    def merge_into_child(self, parent: LaProxNode, child: LaProxNode) -> None:
        """Join two dense nodes; ``child`` stays. The caller has checked that nobody else is anchored at ``parent``."""
        child.key = joined_key(parent.key, child.key)
        child.value = torch.cat([parent.value, child.value])
        child.parent = parent.parent
        child.parent.children[child.key.child_key()] = child
        child.priority = max(parent.priority, child.priority)
        child.hit_count = max(parent.hit_count, child.hit_count)
        child.creation_time = min(parent.creation_time, child.creation_time)
        child.hash_value = child.event_hash_value = None
        child.version += 1
        self.epoch += 1
        self.release_back(parent)
        self.release_back(child)
        del self.by_id[parent.id]
        # A stale handle to the parent (a queued request's last match) must not be mistaken for a live node.
        parent.children = {}

    def compress_node(
        self, node: LaProxNode, positions: torch.Tensor, indptr: torch.Tensor, kind: str = PRESSURE
    ) -> int:
        """Turn a dense node into a compressed one and free the rest of its slots; returns how many became free.

        ``kind`` says why, see ``stats``.
        """
        self.release_back(node)
        segment, freed = segments.pack(self.pool, node.value, positions, indptr)
        node.segment = segment
        node.value = torch.zeros_like(node.value)
        node.due = False
        node.version += 1
        self.epoch += 1
        self._account(node, -freed.shape[0])
        self.token_to_kv_pool_allocator.free(freed)
        start = self.path(node)[-1][1]
        self.stats.compressed(node.id, kind, start, segment, freed.shape[0], self.pool.rows_per_slot)
        return freed.shape[0]

    def hold_back(self, node: LaProxNode, positions: torch.Tensor, indptr: torch.Tensor) -> None:
        """Remember what a dense node would keep; ``evict`` applies it when slots are needed."""
        node.held_back = (positions, indptr)
        self.held_back.add(node)

    def release_back(self, node: LaProxNode) -> None:
        node.held_back = None
        self.held_back.discard(node)

    def _squeeze(self, needed: int) -> int:
        """Shrink unlocked nodes that hold a selection back, coldest first; returns the slots that became free."""
        freed = 0
        for node in sorted(self.held_back):
            if freed >= needed:
                break
            if node.lock_ref == 0:
                assert node.held_back is not None
                freed += self.compress_node(node, *node.held_back)
        return freed

    # Accounting in slots

    def _account(self, node: TreeNode, delta: int) -> None:
        if node.lock_ref > 0:
            self.protected_size_ += delta
        else:
            self.evictable_size_ += delta

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        delta = 0
        while node is not self.root_node:
            if node.lock_ref == 0:
                held = node.slots_held
                self.evictable_size_ -= held
                self.protected_size_ += held
                delta -= held
            node.lock_ref += 1
            self._update_leaf_status(node)
            node = node.parent
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        delta = 0
        while node is not self.root_node:
            if node.lock_ref <= 0:
                raise RuntimeError(f"unlock of a node that nobody holds: {node.key!r}")
            if node.lock_ref == 1:
                held = node.slots_held
                self.evictable_size_ += held
                self.protected_size_ -= held
                delta += held
            node.lock_ref -= 1
            self._update_leaf_status(node)
            node = node.parent
        return DecLockRefResult(delta=delta)

    def evict(self, params: EvictParams) -> EvictResult:
        """Give back ``params.num_tokens`` slots, or all there are: first shrink, then drop unlocked leaves."""
        started = time.perf_counter()
        evicted = self._squeeze(params.num_tokens)
        heap = [(self.eviction_strategy.get_priority(node), node) for node in self.evictable_leaves]
        heapq.heapify(heap)
        while evicted < params.num_tokens and heap:
            _, node = heapq.heappop(heap)
            slots = node.value if node.segment is None else node.segment.slots
            self.token_to_kv_pool_allocator.free(slots)
            evicted += slots.shape[0]
            parent = node.parent
            self._delete_leaf(node)
            if not parent.children and parent.lock_ref == 0:
                heapq.heappush(heap, (self.eviction_strategy.get_priority(parent), parent))
            self.kv_events.record_remove(node)
        self.stats.changed()
        self.update_eviction_metrics(evicted, started)
        return EvictResult(num_tokens_evicted=evicted)

    def _delete_leaf(self, node: LaProxNode) -> None:
        removed = node.parent.children.pop(node.key.child_key())
        if removed is not node:
            raise RuntimeError(f"the tree lost a node: {node.key!r}")
        del self.by_id[node.id]
        self.evictable_size_ -= node.slots_held
        self.evictable_leaves.discard(node)
        self.release_back(node)
        self._update_leaf_status(node.parent)
        if node.segment is not None:
            self.stats.dropped(node.segment)

    # Views

    def path(self, node: TreeNode) -> list[tuple[LaProxNode, int]]:
        """The nodes from below the root down to ``node``, each with the position of its first token."""
        nodes = []
        while node is not self.root_node:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        placed, start = [], 0
        for each in nodes:
            placed.append((each, start))
            start += each.tokens
        return placed

    def nodes(self) -> list[LaProxNode]:
        found, stack = [], list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def all_values_flatten(self) -> torch.Tensor:
        """Every slot that the tree owns."""
        owned = [node.value if node.segment is None else node.segment.slots for node in self.nodes()]
        return torch.cat(owned) if owned else self._empty_device_indices

    def _total_size_helper(self) -> int:
        return sum(node.slots_held for node in self.nodes())
