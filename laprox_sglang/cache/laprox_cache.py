"""``--radix-cache-backend laprox``: decides which stretch of a request's path is compressed, and when.

A request compresses what it computed itself: at prefill end its prompt except the last ``window`` tokens, when it
finishes all the rest. It never changes a node that it found in the tree or that another request holds: so what a
request sees does not depend on what else is batched. A rest shorter than ``min_tokens`` is scored when its request
finishes, but stays dense (lossless) until slots are needed: then such rests shrink before any node is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from laprox_sglang.cache.node import LaProxNode, PathTable
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.cache.segment import concatenate
from laprox_sglang.cache.stats import ANSWER, PROMPT, RESCORE
from laprox_sglang.cache.tree import RaggedRadixCache, RequestState, Stretch
from laprox_sglang.config import LaProxConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Decode steps between the last token that rescoring inserts and the step after which it does.
LAG = 2

# A selector scores one stretch and returns the kept positions [R] int32 within it, ordered by (layer, head,
# position), and their indptr [L * H + 1]. R must be min(stretch.budget, L * H * tokens).
Selector = Callable[[Stretch], tuple[torch.Tensor, torch.Tensor]]


class LaProxRadixCache(RaggedRadixCache):
    """Args: see ``CacheInitParams``; ``selector`` is called before any slot changes hands."""

    def __init__(self, params: CacheInitParams, pool: RowPool, config: LaProxConfig, selector: Selector):
        self.config = config
        # Nothing is compressed while set: the evaluation makes the compressed nodes itself.
        self.frozen = False
        self.selector = selector
        super().__init__(params, pool)

    # What SGLang and the engine's hooks call

    def began(self, req: Req, computed_from: int) -> None:
        """The request's forward starts at token ``computed_from``: the first call after it got its row counts."""
        if req.rid not in self.requests:
            self.requests[req.rid] = RequestState(computed_from)
            self.stats.prompt_tokens += len(req.full_untruncated_fill_ids)
            self.stats.cached_tokens += computed_from

    def checkpoint(self, req: Req, *, up_to: int, **_: object) -> None:
        """Insert the request's KV up to ``up_to`` dense; when it has finished, compress what it leaves behind.

        Ownership: before, the request owns its row's slots ``[cache_protected_len, up_to)``. After, the tree owns
        them, duplicates of what the tree already had are free, and the row says what the tree says (0 where
        compressed). Where a split had no slot to spare, the tail stays with the request.
        """
        if self.disable:
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        protected = req.kv.cache_protected_len
        key = RadixKey(req.full_untruncated_fill_ids[:up_to], extra_key=req.extra_key, cache_salt=req.cache_salt)
        matched, node = self._insert_helper(
            self.root_node,
            key,
            row[:up_to].to(torch.int64),
            req.priority or 0,
            req.kv.cache_inserted_len,
            owner=req.rid,
        )
        if matched > protected:
            self.token_to_kv_pool_allocator.free(row[protected:matched].to(torch.int64))
        values = self.path_device_indices(node)
        if len(values) < protected:
            raise RuntimeError(f"the tree lost the locked prefix of request {req.rid}: {len(values)} < {protected}")
        row[protected : len(values)] = values[protected:].to(row.dtype)
        req.kv.cache_protected_len = len(values)
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(values))
        self.unlock(req.lock)
        req.lock = self.lock(node)
        req.last_node = node
        if req.finished():
            self._compress(req, len(values), ANSWER)
        self.stats.changed()

    def finish_prefill(self, req: Req) -> None:
        """Called when the forward of the prompt's last chunk has been launched: insert and compress the prompt."""
        if self.disable or req.skip_radix_cache_insert or not req.kv.holds_kv:
            return
        self.checkpoint(req, up_to=req.extend_end)
        # A request that was retracted has output tokens among those it prefills again: they are not its prompt.
        if not req.output_ids and req.kv.cache_protected_len == req.extend_end:
            self._compress(req, req.extend_end, PROMPT)

    def rescore(self, req: Req) -> bool:
        """Called when a decode step has been launched: compress the answer so far, if enough has come.

        Returns whether enough had come.

        The schedule depends on the request's own token count only. ``LAG`` steps are waited for, so that the tokens to
        insert are known on the host with overlap scheduling too; the ring still holds the window's queries then.
        """
        state = self.requests.get(req.rid)
        if self.disable or state is None or req.skip_radix_cache_insert or req.finished():
            return False
        end = req.kv.kv_committed_len - LAG
        if end < max(state.decided + self.config.rescore_interval + self.config.window, req.kv.cache_protected_len):
            return False
        req.refresh_fill_ids()
        self.checkpoint(req, up_to=end)
        if req.kv.cache_protected_len == end:
            self._compress(req, end, RESCORE)
            state.rescored += 1
        # Also where another request holds the nodes or no slot was left to insert them: the schedule goes on.
        state.decided = end - self.config.window
        return True

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        self.requests.pop(req.rid, None)

    # Compression

    def _compress(self, req: Req, end: int, kind: str) -> None:
        finished = kind == ANSWER
        state = self.requests.get(req.rid)
        if self.frozen or state is None or state.computed_from >= end:
            return
        if not finished and end - state.computed_from < self.config.min_tokens:
            return
        groups = self._due(req, end if finished else end - self.config.window)
        if not groups:
            return
        started = time.perf_counter()
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        for group in groups:
            node = self._merged(group)
            start = self.path(node)[-1][1]
            kept = self.config.kept_slots(node.tokens)
            if start == 0:
                kept = min(node.tokens, max(kept, self.config.sink))
            stretch = Stretch(req, node, start, end, state.computed_from, kept * self.pool.rows_per_slot)
            positions, indptr = self.selector(stretch)
            if positions.shape[0] != stretch.budget:
                raise RuntimeError(f"the selection has {positions.shape[0]} entries, not the budget {stretch.budget}")
            if finished and node.tokens < self.config.min_tokens:
                if kept < node.tokens:
                    self.hold_back(node, positions, indptr)
                continue
            self.compress_node(node, positions, indptr, kind)
            row[start : start + node.tokens] = 0
        state.decided = max(state.decided, end if finished else end - self.config.window)
        self.stats.timed(kind, time.perf_counter() - started)

    def _due(self, req: Req, limit: int) -> list[list[LaProxNode]]:
        """The dense nodes before token ``limit`` that this request may compress now, grouped into adjacent runs."""
        groups: list[list[LaProxNode]] = []
        previous: LaProxNode | None = None
        for node, start in self.path(req.last_node):
            if start >= limit:
                break
            owned = node.owner == req.rid
            if node.segment is not None or not (owned or node.due):
                continue
            if node.lock_ref > 1:
                # Another request reads these rows. Whoever releases them last compresses them.
                node.due = node.due or owned
                continue
            if start + node.tokens > limit:
                parent = self.split_node(node, limit - start)
                assert parent is not None, "a dense split needs no slot"
                node = parent
            if previous is not None and node.parent is previous and len(previous.children) == 1:
                groups[-1].append(node)
            else:
                groups.append([node])
            previous = node
        return groups

    def _merged(self, group: list[LaProxNode]) -> LaProxNode:
        """One node of a run of adjacent nodes that only this request holds and no other branch leaves."""
        node = group[-1]
        for parent in reversed(group[:-1]):
            self.merge_into_child(parent, node)
        return node

    # Page tables

    def path_table(self, node: TreeNode) -> PathTable | None:
        """The listed rows of the path to ``node``; None when nothing on it is compressed.

        Cached on the deepest compressed node until a node above it changes, so requests that share it share the table.
        """
        while node is not self.root_node and node.segment is None:
            node = node.parent
        if node is self.root_node:
            return None
        table = node.table
        if table is not None and table.epoch == self.epoch:
            return table
        path = self.path(node)
        signature = tuple((each.id, each.version) for each, _ in path)
        if table is not None and table.signature == signature:
            table = table.at(self.epoch)
        else:
            rows, indptr = concatenate(
                self.pool.rows_per_slot, [self._listed(each) for each, _ in path], self.pool.device
            )
            table = PathTable(rows, indptr, path[-1][1] + path[-1][0].tokens, signature, self.epoch)
        node.table = table
        return table

    def _listed(self, node: LaProxNode) -> tuple[torch.Tensor, torch.Tensor]:
        if node.segment is not None:
            return node.segment.row_ids, node.segment.indptr
        # A dense node above a compressed one is listed too, so that what is not listed is one range at the end.
        lists, device = self.pool.rows_per_slot, self.pool.device
        tokens = node.tokens
        which = torch.arange(lists, device=device).repeat_interleave(tokens)
        indptr = torch.arange(lists + 1, device=device) * tokens
        return self.pool.own_rows(which, node.value.repeat(lists)), indptr
