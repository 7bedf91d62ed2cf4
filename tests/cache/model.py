"""A plain model of the tree: every token prefix has the entries that a selector chose for it, or all of them.

It drives the real tree, the real slot allocator and a real (tiny) row pool. Each entry's row holds a number made from
its token prefix, layer and head, so a row that was moved wrongly or overwritten is seen.
"""

from __future__ import annotations

import random
from array import array

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from laprox_sglang.cache.laprox_cache import LaProxRadixCache
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.cache.tree import Stretch
from laprox_sglang.config import LaProxConfig
from laprox_sglang.observe.aside import Aside
from laprox_sglang.observe.kept import KeptCounts

LAYERS, HEADS, MAX_LENGTH = 2, 2, 64
PER_SLOT = LAYERS * HEADS


class FakeRequest:
    """The fields of SGLang's Req that the tree reads."""

    def __init__(self, rid: str, tokens: list[int], extra_key: str | None):
        self.rid = rid
        self.full_untruncated_fill_ids = array("q", tokens)
        self.origin_input_ids = array("q", tokens)
        self.output_ids: list[int] = []
        self.extend_end = len(tokens)
        self.extra_key = extra_key
        self.cache_salt = None
        self.priority = 0
        self.skip_radix_cache_insert = False
        self.kv = ReqKvInfo()
        self.last_node = None
        self.lock = None
        self.done = False

    def finished(self) -> bool:
        return self.done


class TreeModel:
    """Random operations on the tree, and ``check`` after each."""

    def __init__(self, slots: int, config: LaProxConfig, seed: int = 0, policy: str = "lru"):
        self.slots = slots
        k = torch.zeros(LAYERS, slots + 1, HEADS, 1, dtype=torch.float64)
        self.pool = RowPool(k, torch.zeros_like(k))
        self.allocator = TokenToKVPoolAllocator(slots, torch.float64, "cpu", None, False)
        self.rows = ReqToTokenPool(8, MAX_LENGTH, "cpu", False)
        self.random = random.Random(seed)
        self.selected: dict[tuple, frozenset] = {}
        self.codes: dict[tuple, float] = {}
        self.running: list[FakeRequest] = []
        self.count = 0
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            eviction_policy=policy,
        )
        self.tree = LaProxRadixCache(params, self.pool, config, self.select)
        self.kept = KeptCounts(PER_SLOT, True, Aside(self.pool.device))
        self.tree.stats.watchers.append(self.kept)

    # The selector: any set of the right size

    def select(self, stretch: Stretch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = stretch.tokens
        chosen = sorted(self.random.sample(range(PER_SLOT * tokens), stretch.budget))
        counts = [0] * PER_SLOT
        prefix = self.prefix(stretch.req, stretch.start)
        key = list(stretch.node.key.raw_token_ids())
        for t in range(tokens):
            kept = frozenset(index // tokens for index in chosen if index % tokens == t)
            self.selected[(*prefix, *key[: t + 1])] = kept
        for index in chosen:
            counts[index // tokens] += 1
        indptr = torch.tensor([0, *counts]).cumsum(0)
        return torch.tensor([index % tokens for index in chosen], dtype=torch.int32), indptr

    def prefix(self, req: FakeRequest, length: int) -> tuple:
        return (req.extra_key, *req.full_untruncated_fill_ids[:length])

    def code(self, prefix: tuple, which: int) -> float:
        return self.codes.setdefault((prefix, which), float(len(self.codes) + 1))

    # Operations

    def start(self, tokens: list[int], extra_key: str | None = None) -> FakeRequest | None:
        """Admit and prefill a request, as SGLang does; None when it does not fit."""
        if self.rows.available_size() == 0:
            return None
        self.count += 1
        req = FakeRequest(f"r{self.count}", tokens, extra_key)
        result = self.tree.match_prefix(
            MatchPrefixParams(key=RadixKey(req.full_untruncated_fill_ids, extra_key, limit=len(tokens) - 1))
        )
        req.last_node = result.last_device_node
        matched = result.device_prefix_len
        req.lock = self.tree.lock(req.last_node)
        if self.allocator.available_size() + self.tree.evictable_size() < len(tokens) - matched:
            self.tree.unlock(req.lock)
            return None
        self.rows.alloc([req])
        req.kv.cache_protected_len = matched
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        row[:matched] = self.tree.path_device_indices(req.last_node)[:matched].to(row.dtype)
        self.append(req, matched, len(tokens))
        self.tree.began(req, matched)
        self.running.append(req)
        return req

    def append(self, req: FakeRequest, start: int, end: int) -> None:
        if self.allocator.available_size() < end - start:
            self.tree.evict(EvictParams(num_tokens=end - start - self.allocator.available_size()))
        slots = self.allocator.alloc(end - start)
        assert slots is not None, "evictable slots were promised but not given"
        self.rows.req_to_token[req.kv.req_pool_idx, start:end] = slots.to(torch.int32)
        for position, slot in zip(range(start, end), slots.tolist(), strict=True):
            prefix = self.prefix(req, position + 1)
            for layer in range(LAYERS):
                for head in range(HEADS):
                    value = self.code(prefix, layer * HEADS + head)
                    self.pool.k[layer, slot, head] = value
                    self.pool.v[layer, slot, head] = -value
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end

    def decode(self, req: FakeRequest, token: int) -> None:
        length = req.kv.kv_committed_len
        if length + 1 >= MAX_LENGTH or self.allocator.available_size() + self.tree.evictable_size() < 1:
            return
        req.output_ids.append(token)
        req.full_untruncated_fill_ids.append(token)
        self.append(req, length, length + 1)

    def release(self, req: FakeRequest, checkpoint: bool) -> None:
        """What ``release_kv_cache`` does for a plain model."""
        length = req.kv.kv_committed_len
        if checkpoint:
            req.done = True
            self.tree.checkpoint(req, up_to=length)
        self.tree.free_kv_row(req.kv, [(req.kv.cache_protected_len, length)])
        self.tree.unlock(req.lock)
        self.tree.on_release(req, checkpointed=checkpoint)
        self.rows.free(req)
        req.kv.req_pool_idx = None
        self.running.remove(req)

    # Invariants

    def check(self) -> None:
        tree = self.tree
        owners: dict[int, str] = {slot: "free" for slot in self.allocator.free_pages.tolist()}
        assert len(owners) == self.allocator.available_size(), "a slot is free twice"

        def own(slots: list[int], owner: str) -> None:
            for slot in slots:
                assert slot not in owners, f"slot {slot} belongs to {owners[slot]} and to {owner}"
                owners[slot] = owner

        for req in self.running:
            row = self.rows.req_to_token[req.kv.req_pool_idx]
            own(row[req.kv.cache_protected_len : req.kv.kv_allocated_len].tolist(), req.rid)
        alive: set[tuple] = set()
        evictable = protected = 0
        stack = [(child, (child.key.extra_key,)) for child in tree.root_node.children.values()]
        while stack:
            node, prefix = stack.pop()
            key = list(node.key.raw_token_ids())
            assert len(node.value) == len(key)
            assert node.parent.children[node.key.child_key()] is node
            slots = (node.value if node.segment is None else node.segment.slots).tolist()
            own(slots, f"node {node.id}")
            assert node.slots_held == len(slots)
            if node.lock_ref:
                protected += len(slots)
            else:
                evictable += len(slots)
            self.check_node(node, prefix, key, alive)
            stack.extend((child, (*prefix, *key)) for child in node.children.values())
        assert (tree.evictable_size(), tree.protected_size()) == (evictable, protected)
        assert len(owners) == self.slots, f"{self.slots - len(owners)} slots have no owner"
        held = [node.segment for node in tree.nodes() if node.segment is not None]
        assert tree.stats.segment_slots == sum(len(segment.slots) for segment in held)
        assert tree.stats.segment_tokens == sum(segment.tokens for segment in held)
        assert tree.stats.segment_entries == sum(segment.entries for segment in held)
        assert set(tree.by_id.values()) == set(tree.nodes()) and all(
            tree.by_id[each.id] is each for each in tree.nodes()
        )
        lists = sum((segment.indptr.diff() for segment in held), torch.zeros(PER_SLOT, dtype=torch.int64))
        assert self.kept.total().tolist() == lists.tolist()
        for prefix in [each for each in self.selected if each not in alive]:
            del self.selected[prefix]

    def check_node(self, node, prefix: tuple, key: list[int], alive: set) -> None:
        prefixes = [(*prefix, *key[: t + 1]) for t in range(len(key))]
        alive.update(prefixes)
        if node.segment is None:
            for t, slot in enumerate(node.value.tolist()):
                for which in range(PER_SLOT):
                    row = (which // HEADS, slot, which % HEADS, 0)
                    assert float(self.pool.k[row]) == self.code(prefixes[t], which)
                    assert float(self.pool.v[row]) == -self.code(prefixes[t], which)
            return
        segment = node.segment
        assert (node.value == 0).all()
        assert segment.tokens == len(key) and len(segment.slots) == self.pool.slots_for(segment.entries)
        rows, positions, indptr = segment.row_ids.tolist(), segment.host_positions.tolist(), segment.indptr.tolist()
        assert len(rows) == len(set(rows)) == indptr[-1] == len(positions)
        found: list[set] = [set() for _ in key]
        values, mirrored = self.pool.k_rows.flatten().tolist(), self.pool.v_rows.flatten().tolist()
        for which in range(PER_SLOT):
            ours = positions[indptr[which] : indptr[which + 1]]
            assert ours == sorted(set(ours))
            for position, row in zip(ours, rows[indptr[which] : indptr[which + 1]], strict=True):
                assert values[row] == self.code(prefixes[position], which)
                assert mirrored[row] == -values[row]
                found[position].add(which)
        for t, each in enumerate(found):
            assert frozenset(each) == self.selected[prefixes[t]]
