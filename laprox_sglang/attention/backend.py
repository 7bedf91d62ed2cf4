"""``--attention-backend laprox``: SGLang's stock backend, and ragged rows where a batch has compressed tokens.

State that is rebuilt for each batch lives here (page table of the batch, where its queries go); what survives
append, fork and free belongs to the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from laprox_sglang.cache.node import PathTable
    from laprox_sglang.cache.query_ring import QueryRing, RingPlan
    from laprox_sglang.cache.rows import RowPool

STOCK_BACKEND = {"cpu": "torch_native", "cuda": "triton"}


@dataclass(frozen=True)
class BatchPaths:
    """What the scheduler side says of the batch that is about to run, request by request.

    Attributes:
        tables: the listed part of each request's path, None where nothing is compressed.
        pool_rows: each request's row of ``req_to_token``.
    """

    tables: Sequence[PathTable | None]
    pool_rows: Sequence[int]


@dataclass(frozen=True)
class _BatchRows:
    """The listed rows of a set of requests; the same for all steps until the set or a path changes."""

    tables: tuple[PathTable | None, ...]
    rows: torch.Tensor
    indptr: np.ndarray
    starts: np.ndarray


class LaProxAttentionBackend(AttentionBackend):
    """Wraps the stock backend of the device. Without ``attach`` it is the stock backend."""

    def __init__(self, model_runner: Any):
        super().__init__()
        device = torch.device(model_runner.device).type
        if device not in STOCK_BACKEND:
            raise ValueError(f"laprox has no attention for device {device!r}; it works on cpu and cuda")
        self.stock = ATTENTION_BACKENDS[STOCK_BACKEND[device]](model_runner)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.needs_cpu_seq_lens = True
        self.pool: RowPool | None = None
        self.ring: QueryRing | None = None
        self.attention: RaggedAttention | None = None
        self._announced: BatchPaths | None = None
        self._batch: RaggedBatch | None = None
        self._plan: RingPlan | None = None
        self._rows: _BatchRows | None = None

    def attach(self, pool: RowPool, ring: QueryRing, attention: RaggedAttention) -> None:
        """Called once, when the tree exists."""
        self.pool, self.ring, self.attention = pool, ring, attention

    def announce(self, paths: BatchPaths | None) -> None:
        """Called before each batch; the next ``init_forward_metadata`` consumes it."""
        self._announced = paths

    # Metadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        paths, self._announced = self._announced, None
        self._batch = self._plan = None
        if paths is None or self.pool is None or forward_batch.forward_mode.is_idle():
            self.stock.init_forward_metadata(forward_batch)
            return
        if len(paths.tables) != forward_batch.batch_size:
            raise RuntimeError(f"{len(paths.tables)} requests announced, {forward_batch.batch_size} run")
        ends = np.asarray(forward_batch.seq_lens_cpu, dtype=np.int64)
        if forward_batch.forward_mode.is_decode():
            lengths = np.ones_like(ends)
        else:
            lengths = np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64)
        assert self.ring is not None
        self._plan = self.ring.plan(list(paths.pool_rows), (ends - lengths).tolist(), lengths.tolist())
        if all(table is None for table in paths.tables):
            self.stock.init_forward_metadata(forward_batch)
            return
        rows = self._batch_rows(paths)
        self._batch = RaggedBatch.build(
            rows=rows.rows,
            indptr=rows.indptr,
            slots=self.req_to_token,
            pool_index=paths.pool_rows,
            tail_start=rows.starts,
            seq_len=ends,
            q_len=lengths,
            num_kv_heads=self.pool.heads,
        )

    def _batch_rows(self, paths: BatchPaths) -> _BatchRows:
        tables = tuple(paths.tables)
        known = self._rows
        # By identity: a table is replaced, never changed.
        if known is not None and list(map(id, known.tables)) == list(map(id, tables)):
            return known
        assert self.pool is not None
        offsets: dict[int, int] = {}
        parts: list[torch.Tensor] = []
        total = 0
        indptr = np.zeros((len(tables), self.pool.rows_per_slot + 1), dtype=np.int64)
        for index, table in enumerate(tables):
            if table is None:
                continue
            # Requests that share a path share its rows.
            if id(table) not in offsets:
                offsets[id(table)] = total
                parts.append(table.rows)
                total += table.rows.shape[0]
            indptr[index] = table.host_indptr + offsets[id(table)]
        self._rows = _BatchRows(
            tables=tables,
            rows=torch.cat(parts),
            indptr=indptr,
            starts=np.array([0 if table is None else table.end for table in tables], dtype=np.int64),
        )
        return self._rows

    # Forward

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._store_queries(q, layer)
        if self._batch is None:
            return self.stock.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._ragged(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._store_queries(q, layer)
        if self._batch is None:
            return self.stock.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._ragged(q, k, v, layer, forward_batch, save_kv_cache)

    def _store_queries(self, q: torch.Tensor, layer: RadixAttention) -> None:
        if self._plan is not None:
            assert self.ring is not None
            self.ring.store(layer.layer_id, q, self._plan)

    def _ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        assert self.pool is not None and self.attention is not None and self._batch is not None
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self.attention.forward(
            query,
            self.pool.k_rows,
            self.pool.v_rows,
            layer.layer_id,
            self._batch,
            layer.scaling,
            layer.logit_cap,
        )
        return out.reshape(query.shape[0], -1)

    # What SGLang asks of a backend besides

    def support_triton(self) -> bool:
        return self.stock.support_triton()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.stock.get_cuda_graph_seq_len_fill_value()
