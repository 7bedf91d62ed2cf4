"""``--attention-backend laprox``: SGLang's stock backend, and ragged rows where a batch has compressed tokens.

State that is rebuilt for each batch lives here (page table of the batch, where its queries go); what survives
append, fork and free belongs to the tree.

With ``--laprox-cuda-graphs decode`` each batch size is recorded twice, dense and compressed (``graph_variants``), and a
step replays the one that its requests need. What the recorded kernels read is in ``static_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

from laprox_sglang.attention import graph_variants
from laprox_sglang.attention.base import RaggedBatch
from laprox_sglang.attention.static_batch import Lists, StaticBatch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from laprox_sglang.cache.node import PathTable
    from laprox_sglang.cache.query_ring import RingPlan
    from laprox_sglang.parts import Parts

STOCK_BACKEND = {"cpu": "torch_native", "cuda": "triton"}

# SGLang makes one attention backend per scheduler process (drafts and pipelines, which make more, are refused).
_current: LaProxAttentionBackend | None = None


def current() -> LaProxAttentionBackend | None:
    """The backend of this process; None in a server without ours."""
    return _current


@dataclass(frozen=True)
class BatchPaths:
    """What the scheduler side says of the batch that is about to run, request by request.

    Attributes:
        tables: the listed part of each request's path, None where nothing is compressed.
        pool_rows: each request's row of ``req_to_token``.
    """

    tables: Sequence[PathTable | None]
    pool_rows: Sequence[int]

    @property
    def compressed(self) -> bool:
        return any(table is not None for table in self.tables)


@dataclass(frozen=True)
class _BatchRows:
    """The listed rows of a set of requests; the same for all steps until the set or a path changes."""

    tables: tuple[PathTable | None, ...]
    rows: torch.Tensor
    indptr: np.ndarray | torch.Tensor
    starts: np.ndarray


class LaProxAttentionBackend(AttentionBackend):
    """Wraps the stock backend of the device. Before ``prepare`` it is the stock backend.

    Args:
        make_parts: makes what it shares with the cache; called by the first ``prepare``.
    """

    def __init__(self, model_runner: Any, make_parts: Callable[[], Parts]):
        global _current
        super().__init__()
        device = torch.device(model_runner.device).type
        if device not in STOCK_BACKEND:
            raise ValueError(f"laprox has no attention for device {device!r}; it works on cpu and cuda")
        self.stock = ATTENTION_BACKENDS[STOCK_BACKEND[device]](model_runner)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.needs_cpu_seq_lens = True
        self.parts: Parts | None = None
        self._make_parts = make_parts
        self._static: StaticBatch | None = None
        self._ring_targets: torch.Tensor | None = None
        self._announced: BatchPaths | None = None
        self._batch: RaggedBatch | None = None
        self._plan: RingPlan | None = None
        self._rows: _BatchRows | None = None
        _current = self

    def prepare(self) -> Parts:
        """Make the parts, once. Raises ValueError for a model or pool that cannot be compressed."""
        if self.parts is None:
            self.parts = self._make_parts()
        return self.parts

    def announce(self, paths: BatchPaths | None) -> None:
        """Called before each batch; the next ``init_forward_metadata`` consumes it."""
        self._announced = paths

    # Metadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        paths, self._announced = self._announced, None
        self._batch = self._plan = None
        if paths is None or self.parts is None or forward_batch.forward_mode.is_idle():
            self.stock.init_forward_metadata(forward_batch)
            return
        if len(paths.tables) != forward_batch.batch_size:
            raise RuntimeError(f"{len(paths.tables)} requests announced, {forward_batch.batch_size} run")
        ring = self.parts.ring
        ends = np.asarray(forward_batch.seq_lens_cpu, dtype=np.int64)
        if forward_batch.forward_mode.is_decode():
            lengths = np.ones_like(ends)
            self._plan = ring.decode_plan(forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long())
        else:
            lengths = np.asarray(forward_batch.extend_seq_lens_cpu, dtype=np.int64)
            self._plan = ring.plan(list(paths.pool_rows), (ends - lengths).tolist(), lengths.tolist())
        if not paths.compressed:
            self.stock.init_forward_metadata(forward_batch)
            return
        rows = self._batch_rows(paths, self.parts)
        self._batch = RaggedBatch.build(
            rows=rows.rows,
            indptr=rows.indptr,
            slots=self.req_to_token,
            pool_index=paths.pool_rows,
            tail_start=rows.starts,
            seq_len=ends,
            q_len=lengths,
            num_kv_heads=self.parts.pool.heads,
        )

    def _batch_rows(self, paths: BatchPaths, parts: Parts) -> _BatchRows:
        tables = tuple(paths.tables)
        known = self._rows
        # By identity: a table is replaced, never changed.
        if known is not None and list(map(id, known.tables)) == list(map(id, tables)):
            return known
        on_host = parts.attention.needs_host_lists
        offsets: dict[int, int] = {}
        rows: list[torch.Tensor] = []
        size = parts.pool.rows_per_slot + 1
        empty = np.zeros(size, np.int64) if on_host else torch.zeros(size, dtype=torch.int64, device=parts.pool.device)
        lists: list[Any] = []
        total = 0
        for table in tables:
            if table is None:
                lists.append(empty)
                continue
            # Requests that share a path share its rows.
            if id(table) not in offsets:
                offsets[id(table)] = total
                rows.append(table.rows)
                total += table.rows.shape[0]
            lists.append((table.host_indptr if on_host else table.indptr) + offsets[id(table)])
        self._rows = _BatchRows(
            tables=tables,
            rows=torch.cat(rows),
            indptr=np.stack(lists) if on_host else torch.stack(lists),
            starts=np.array([0 if table is None else table.end for table in tables], dtype=np.int64),
        )
        return self._rows

    # CUDA graphs of decode steps

    @property
    def next_is_compressed(self) -> bool:
        """Whether the announced batch has compressed tokens."""
        return self._announced is not None and self._announced.compressed

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.stock.init_cuda_graph_state(max_bs, max_num_tokens)
        parts = self.prepare()
        if not parts.attention.recordable:
            raise ValueError(f"the {parts.attention.name} kernels cannot be recorded in CUDA graphs; use triton")
        graph_variants.check_environment()
        self._static = StaticBatch(max_bs, parts.pool.rows_per_slot, parts.pool.heads, self.req_to_token)
        self._ring_targets = torch.zeros(max_bs, dtype=torch.int64, device=parts.pool.device)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a decode step is recorded or replayed: fill what it reads.

        ``forward_batch`` is padded to the recorded size; its ``req_pool_indices`` and ``seq_lens`` are SGLang's static
        buffers, which say row 0 and one token (SGLang's padding slot) for the padding.
        """
        paths, self._announced = self._announced, None
        self._batch = self._plan = None
        if self.parts is None or self._static is None or self._ring_targets is None:
            raise RuntimeError("a CUDA graph is used before init_cuda_graph_state")
        size, tables = forward_batch.batch_size, [] if paths is None else paths.tables
        pool_index, seq_lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        compressed = paths is not None and paths.compressed
        if in_capture:
            self._plan = self.parts.ring.decode_plan(pool_index, seq_lens, self._ring_targets[:size])
            compressed = get_capture_attention_variant() == graph_variants.COMPRESSED
            if compressed:
                self._batch = self._static.batch(pool_index, seq_lens)
        if compressed:
            lists = [None if table is None else Lists(table.rows, table.indptr, table.end) for table in tables]
            self._static.fill(lists, size)
        else:
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Recorded in front of the layers: where the step's queries go, from static buffers to a static buffer."""
        if self._batch is None:
            self.stock.init_forward_metadata_in_graph(forward_batch)
        if self.parts is not None and self._plan is not None:
            target = self._plan.target
            self.parts.ring.decode_plan(forward_batch.req_pool_indices, forward_batch.seq_lens, target)

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """The kernels read ``req_to_token`` and page tables in every layer, so until a forward's end.

        SGLang then orders what the scheduler's stream does next behind the whole forward. The tree's moves and the
        reuse of freed page tables rely on that (see runtime.py).
        """
        if self.parts is None:
            return self.stock.shared_read_ends(fm)
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

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
        if self._plan is not None and self.parts is not None:
            self.parts.ring.store(layer.layer_id, q, self._plan)

    def _ragged(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        assert self.parts is not None and self._batch is not None
        pool = self.parts.pool
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self.parts.attention.forward(
            query,
            pool.k_rows,
            pool.v_rows,
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
