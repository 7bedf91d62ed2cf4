"""Scores a dense stretch with its request's window queries and selects what is kept (LaProx, arXiv 2605.07234).

Nothing from inside the forward pass is needed: queries come from the ring, keys and values from the pool, W_O from
the model. All layers are scored before anything is selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.cache import rows as row_views
from laprox_sglang.cache.laprox_cache import LaProxRadixCache
from laprox_sglang.cache.query_ring import QueryRing
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.cache.segment import concatenate
from laprox_sglang.cache.trace import trace_folder
from laprox_sglang.cache.trace import write as write_trace
from laprox_sglang.cache.tree import Stretch
from laprox_sglang.config import LaProxConfig
from laprox_sglang.policy.allocations.base import Allocation
from laprox_sglang.policy.registry import get_allocation, get_score
from laprox_sglang.policy.scores.base import LayerView, ScoreOptions
from laprox_sglang.policy.select import Selection, select


@dataclass(frozen=True)
class Scored:
    """What one pass over a stretch finds out.

    Attributes:
        scores: ``[L, H, n + w]`` float32, of the stretch and of the w dense tokens after it.
        tokens: n, the length of the stretch.
        first: like scores, for a score with two stages (see ``Score.first_stage``).
        weights: ``[L]`` float64, for an allocation that weighs layers.
    """

    scores: Tensor
    tokens: int
    first: Tensor | None = None
    weights: Tensor | None = None


class Compressor:
    """The selector of ``LaProxRadixCache``.

    Args:
        projection: ``[L, H, G, D, D]`` float32 Gram factors of W_O (see ``cache.output_projection``).
        output: ``[L, H, G, D, hidden]`` W_O itself, for a score that reads it.
        scales, caps: per layer, the softmax scale and the logit cap (0: none).
    """

    def __init__(
        self,
        config: LaProxConfig,
        pool: RowPool,
        ring: QueryRing,
        attention: RaggedAttention,
        projection: Tensor,
        scales: list[float],
        caps: list[float],
        output: Tensor | None = None,
    ):
        self.config = config
        self.pool = pool
        self.ring = ring
        self.attention = attention
        self.projection = projection
        # Side by side and in the pool's dtype: one matrix product per KV head serves its whole group.
        layers, heads, group, size, _ = projection.shape
        self.factors = projection.transpose(2, 3).reshape(layers, heads, size, group * size).to(pool.k.dtype)
        self.scales = scales
        self.caps = caps
        self.score = get_score(config.score)
        self.allocation = get_allocation(config.allocation, config.profile)
        if self.score.reads_output and output is None:
            raise ValueError(f"the score {config.score!r} needs the output projection's weights")
        self.output = output
        self.options = ScoreOptions(pool_kernel=config.pool_kernel, gqa=config.gqa)
        self.kernels = None
        if row_views.on_gpu(pool.device):
            from laprox_sglang.attention.gpu_scores import GpuScores

            self.kernels = GpuScores(self.factors, scales, caps, self.options)
        self.trace = trace_folder()
        self.tree: LaProxRadixCache | None = None

    def __call__(self, stretch: Stretch) -> tuple[Tensor, Tensor]:
        scored = self.scores(stretch)
        selection = self.select(scored, stretch, self.allocation, stretch.budget)
        if self.trace is not None:
            kept = selection.positions.cpu().numpy(), selection.indptr.cpu().numpy()
            write_trace(self.trace, stretch, *kept, (self.pool.layers, self.pool.heads))
        return selection.positions, selection.indptr

    def select(self, scored: Scored, stretch: Stretch, allocation: Allocation, budget: int) -> Selection:
        """The entries of a scored stretch that an allocation keeps; the same scores serve any number of budgets."""
        scores = scored.scores
        protected = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
        if stretch.start == 0:
            protected[: self.config.sink] = True
        plain = scored.first is None and scored.weights is None
        if self.kernels is not None and plain:
            from laprox_sglang.attention.gpu_scores import select_entries

            return select_entries(scores, budget, allocation, protected, scored.tokens)
        return select(scores, budget, allocation, protected, scored.tokens, first=scored.first, weights=scored.weights)

    def warm_up(self) -> None:
        """Compile what scoring will run, so that no request waits for it."""
        if self.kernels is not None:
            query_heads = self.ring.buffer.shape[3]
            self.kernels.warm_up(self.pool.k, self.pool.v, self.config.window, query_heads)
        if self.pool.device.type == "cpu":
            from laprox_sglang.attention import cpu_scores

            cpu_scores.warm_up(self.pool.k.dtype, self.pool.head_dim)

    def scores(self, stretch: Stretch) -> Scored:
        """Scores of the stretch and of the dense tokens after it (the window's own)."""
        assert self.tree is not None
        pool, config = self.pool, self.config
        path = self.tree.path(stretch.req.last_node)
        dense = [(node, start) for node, start in path if node.segment is None]
        listed_end = max((start + node.tokens for node, start in path if node.segment is not None), default=0)
        window = min(config.window, stretch.end - stretch.computed_from)
        # A query must not score with entries that lie after it; only a path adopted from a longer prompt has such.
        window = max(1, min(window, stretch.end - listed_end))
        slots = torch.cat([node.value for node, _ in dense])
        first = sum(node.tokens for node, start in dense if start < stretch.start)
        tokens = stretch.node.tokens
        queries = self.ring.read(stretch.req.kv.req_pool_idx, stretch.end, window)
        if self.kernels is not None and self.kernels.makes(self.score) and not self.allocation.weighs_layers:
            return Scored(self.kernels(queries, pool.k, pool.v, slots, first, self._listed_rows(stretch)), tokens)
        # The path ends where the queries do, and the tokens from the first query on are dense. So of the last
        # window - 1 tokens each is hidden from the queries before it. Made on the device: a copy there would wait.
        late = window - 1
        causal = torch.full((window, late), float("-inf"), device=pool.device).triu()
        visible = slots.shape[0] - torch.arange(first, slots.shape[0], device=pool.device)
        visible = visible.clamp(max=window).float()
        listed = self._listed_batch(stretch)

        heads, group = pool.heads, queries.shape[2] // pool.heads
        select_rows = _rows_of(slots)
        fused = pool.device.type == "cpu" and not (self.score.reads_attention or self.allocation.weighs_layers)
        dtype = torch.float32
        if fused:
            from laprox_sglang.attention.cpu_scores import FusedFactors

            factors = FusedFactors(pool.k.dtype, (heads, group, slots.shape[0] - first, pool.head_dim))
            dtype = factors.logits_dtype
        # [L, H, G * W, D]
        query = queries.view(pool.layers, window, heads, group, -1).permute(0, 2, 3, 1, 4).to(dtype)
        query = query.reshape(pool.layers, heads, group * window, -1)
        # Buffers for all layers: fresh memory costs the operating system as much as a product.
        keys = torch.empty((heads, slots.shape[0], pool.head_dim), dtype=dtype, device=pool.device)
        logits = torch.empty((heads, group * window, slots.shape[0]), dtype=dtype, device=pool.device)
        by_query = logits.view(heads, group, window, -1)
        causal = causal.to(dtype)
        result = torch.empty((pool.layers, heads, slots.shape[0] - first), device=pool.device)
        firsts: list[Tensor] = []
        weights: list[Tensor] = []
        for layer in range(pool.layers):
            keys.copy_(select_rows(pool.k[layer]).transpose(0, 1))
            torch.baddbmm(logits, query[layer], keys.transpose(1, 2), beta=0, alpha=self.scales[layer], out=logits)
            cap = self.caps[layer]
            if cap > 0:
                logits.div_(cap).tanh_().mul_(cap)
            by_query[..., logits.shape[2] - late :] += causal
            others = None
            if listed is not None:
                lse = self.attention.lse_of_lists(
                    queries[layer][None].contiguous(), pool.k_rows, layer, listed, self.scales[layer], cap
                )
                others = lse[0].view(window, heads, group).permute(1, 2, 0)
            values = select_rows(pool.v[layer])[first:]
            if fused:
                view = LayerView(
                    None,
                    values,
                    self.projection[layer],
                    visible,
                    column_squares=factors.column_squares(by_query, others, first),
                    norms=factors.norms(values, self.factors[layer]),
                    window=window,
                )
            else:
                total = torch.logsumexp(by_query, dim=-1)
                total = total if others is None else torch.logaddexp(total, others)
                attention = (by_query[..., first:] - total[..., None]).exp_()
                output = None if self.output is None else self.output[layer]
                view = LayerView(attention, values, self.projection[layer], visible, output=output)
            result[layer] = self.score(view, self.options)
            early = self.score.first_stage(view, self.options)
            if early is not None:
                firsts.append(early)
            if self.allocation.weighs_layers:
                weights.append(self.allocation.layer_weight(view, tokens))
        return Scored(
            result, tokens, torch.stack(firsts) if firsts else None, torch.stack(weights) if weights else None
        )

    def _listed_rows(self, stretch: Stretch) -> tuple[Tensor, Tensor] | None:
        """Rows and indptr of the compressed nodes of the request's path."""
        assert self.tree is not None
        segments = [node.segment for node, _ in self.tree.path(stretch.req.last_node) if node.segment is not None]
        if not segments:
            return None
        parts = [(each.row_ids, each.indptr) for each in segments]
        return concatenate(self.pool.rows_per_slot, parts, self.pool.device)

    def _listed_batch(self, stretch: Stretch) -> RaggedBatch | None:
        listed = self._listed_rows(stretch)
        if listed is None or self.tree is None:
            return None
        rows, indptr = listed
        return RaggedBatch.build(
            rows=rows,
            indptr=indptr[None],
            slots=self.tree.req_to_token_pool.req_to_token,
            pool_index=[stretch.req.kv.req_pool_idx],
            tail_start=[stretch.end - 1],
            seq_len=[stretch.end],
            q_len=[1],
            num_kv_heads=self.pool.heads,
        )


def _rows_of(slots: Tensor) -> Callable[[Tensor], Tensor]:
    """Selects the rows ``slots`` of a layer's buffer, without a copy where they lie side by side (seen on a CPU only:
    elsewhere looking would wait for the device)."""
    if slots.device.type == "cpu" and bool((slots.diff() == 1).all()):
        low, high = int(slots[0]), int(slots[-1]) + 1
        return lambda buffer: buffer[low:high]
    return lambda buffer: buffer.index_select(0, slots)
