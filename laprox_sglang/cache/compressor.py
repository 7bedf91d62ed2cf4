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
        return select(scores, budget, allocation, protected, scored.tokens, first=scored.first, weights=scored.weights)

    def warm_up(self) -> None:
        """Compile what scoring will run, so that no request waits for it."""
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
        positions = torch.cat([torch.arange(start, start + node.tokens) for node, start in dense])
        first = sum(node.tokens for node, start in dense if start < stretch.start)
        tokens = stretch.node.tokens

        queries = self.ring.read(stretch.req.kv.req_pool_idx, stretch.end, window)
        # Only the last dense tokens lie behind some of the queries.
        late = int((positions > stretch.end - window).sum())
        query_positions = torch.arange(stretch.end - window, stretch.end)
        hidden = positions[None, len(positions) - late :] > query_positions[:, None]
        causal = torch.where(hidden, float("-inf"), 0.0).to(pool.device)
        visible = torch.full((slots.shape[0],), float(window))
        visible[len(positions) - late :] -= hidden.sum(0)
        visible = visible[first:].to(pool.device)
        listed = self._listed_batch(stretch)

        heads, group = pool.heads, queries.shape[2] // pool.heads
        select_rows = _rows_of(slots)
        fused = pool.device.type == "cpu" and not (self.score.reads_attention or self.allocation.weighs_layers)
        shape = (heads, group * window, slots.shape[0])
        logits = torch.empty(shape, device=pool.device)
        result = torch.empty((pool.layers, heads, slots.shape[0] - first), device=pool.device)
        firsts: list[Tensor] = []
        weights: list[Tensor] = []
        for layer in range(pool.layers):
            keys = select_rows(pool.k[layer]).transpose(0, 1).float()
            query = queries[layer].float().view(window, heads, group, -1).permute(1, 2, 0, 3) * self.scales[layer]
            torch.bmm(query.reshape(heads, group * window, -1), keys.transpose(1, 2), out=logits)
            cap = self.caps[layer]
            if cap > 0:
                logits.div_(cap).tanh_().mul_(cap)
            by_query = logits.view(heads, group, window, -1)
            by_query[..., shape[2] - late :] += causal
            others = None
            if listed is not None:
                lse = self.attention.lse_of_lists(
                    queries[layer][None].contiguous(), pool.k_rows, layer, listed, self.scales[layer], cap
                )
                others = lse[0].view(window, heads, group).permute(1, 2, 0)
            values = select_rows(pool.v[layer])[first:]
            if fused:
                view = self._fused_view(by_query, others, first, values, layer, visible)
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

    def _fused_view(
        self, logits: Tensor, others: Tensor | None, first: int, values: Tensor, layer: int, visible: Tensor
    ) -> LayerView:
        from laprox_sglang.attention.cpu_scores import column_squares, projected_norms

        return LayerView(
            None,
            values,
            self.projection[layer],
            visible,
            column_squares=column_squares(logits, others, first),
            norms=projected_norms(values, self.factors[layer]),
            window=logits.shape[2],
        )

    def _listed_batch(self, stretch: Stretch) -> RaggedBatch | None:
        assert self.tree is not None
        segments = [node.segment for node, _ in self.tree.path(stretch.req.last_node) if node.segment is not None]
        if not segments:
            return None
        rows, indptr = concatenate(
            self.pool.rows_per_slot,
            [(each.row_ids, each.indptr) for each in segments],
            self.pool.device,
        )
        return RaggedBatch.build(
            rows=rows,
            indptr=indptr[None].cpu().numpy(),
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
