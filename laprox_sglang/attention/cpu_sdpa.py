"""Ragged attention for long extends on a CPU, and the dispatcher that is the CPU's default.

The new tokens attend to what came before them (listed rows and older dense tokens, gathered once for each kv head;
no mask) and to each other (causal) in two calls of torch's own flash attention, merged by their log-sum-exp. So T new
tokens after a prefix of P cost T * (P + T / 2), never (P + T) squared.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.attention.cpu_numba import NumbaRaggedAttention
from laprox_sglang.attention.torch_reference import TorchRaggedAttention, capped, listed_rows, tail_slots

# Requests with at most this many (new token, row) pairs for each list walk their rows in place; more are worth a gather
# and matmuls. Measured with 3 query heads in a group, both take the same time at 16 new tokens and 6,000 rows; at 20
# and 600 walking takes a quarter.
WALKED_WORK = 90_000
# Queries for which the capped path forms logits at a time.
QUERY_BLOCK = 128


class SdpaRaggedAttention(RaggedAttention):
    """Loops over requests. Passes over those whose work is at most ``least_work``: their output stays as it is."""

    name = "sdpa"

    def __init__(self, least_work: int = 0) -> None:
        self.least_work = least_work
        self._reference = TorchRaggedAttention()

    def forward(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        logit_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        heads, head_dim = batch.num_kv_heads, q.shape[2]
        of_head = layer * batch.slot_stride(k_rows) * heads + torch.arange(heads)[:, None]
        for request in np.flatnonzero(batch.row_work > self.least_work).tolist():
            first, last = int(batch.q_start_host[request]), int(batch.q_start_host[request + 1])
            new = last - first
            dense = tail_slots(batch, request) * heads + of_head  # [H, tail]
            older, newest = dense[:, :-new], dense[:, -new:]
            prefix = [torch.cat([listed_rows(batch, request, layer, h), older[h]]) for h in range(heads)]
            # [H, G, new, D]: kv heads as the batch, so that a group shares its keys without a copy
            queries = q[first:last].view(new, heads, -1, head_dim).permute(1, 2, 0, 3)
            if logit_cap > 0:
                result = capped_attention(queries, k_rows, v_rows, prefix, newest, scale, logit_cap)
            else:
                result = merged_attention(queries, k_rows, v_rows, prefix, newest, scale)
            out[first:last].view(new, heads, -1, head_dim).copy_(result.permute(2, 0, 1, 3))
        return out

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        return self._reference.lse_of_lists(q, k_rows, layer, batch, scale, logit_cap)


def merged_attention(
    queries: Tensor, k_rows: Tensor, v_rows: Tensor, prefix: list[Tensor], newest: Tensor, scale: float
) -> Tensor:
    """[H, G, new, D] of queries [H, G, new, D]; prefix[h] [P_h] and newest [H, new] are row ids."""
    heads, group, new, head_dim = queries.shape
    own_k, own_v = (pool[newest][:, None].expand(-1, group, -1, -1) for pool in (k_rows, v_rows))
    own, own_lse = flash(queries, own_k, own_v, scale, causal=True)
    folded = queries.reshape(heads, 1, group * new, head_dim)  # no mask: the whole group is one run of queries
    if len({len(rows) for rows in prefix}) == 1:
        calls = [(slice(0, heads), torch.stack(prefix))]
    else:
        calls = [(slice(h, h + 1), rows[None]) for h, rows in enumerate(prefix)]
    result = own.float()
    for part, rows in calls:
        if rows.shape[1] == 0:
            continue
        before, before_lse = flash(folded[part], k_rows[rows][:, None], v_rows[rows][:, None], scale, causal=False)
        weight = torch.sigmoid(before_lse.view(-1, group, new) - own_lse[part])[..., None]
        result[part].lerp_(before.view(-1, group, new, head_dim).float(), weight)
    return result


def flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output in q's dtype and log-sum-exp [batch, heads, queries] float32."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def capped_attention(
    queries: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    prefix: list[Tensor],
    newest: Tensor,
    scale: float,
    logit_cap: float,
) -> Tensor:
    """As merged_attention, with capped logits, which no fused CPU kernel has: plain float32 in blocks of queries."""
    result = torch.empty(queries.shape)
    new = queries.shape[2]
    for head, rows in enumerate(prefix):
        keys, values = (pool[torch.cat([rows, newest[head]])].float() for pool in (k_rows, v_rows))
        for start in range(0, new, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, new)
            reach = len(rows) + end
            logits = capped(queries[head, :, start:end].float() @ keys[:reach].T * scale, logit_cap)
            hidden = torch.ones(end - start, reach, dtype=torch.bool).triu(len(rows) + start + 1)
            weights = logits.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
            result[head, :, start:end] = weights @ values[:reach]
    return result


class CpuRaggedAttention(RaggedAttention):
    """Each request by its work: rows in place (numba), or gathered (flash attention)."""

    name = "cpu"

    def __init__(self) -> None:
        self.short = NumbaRaggedAttention(most_work=WALKED_WORK)
        self.long = SdpaRaggedAttention(least_work=WALKED_WORK)

    def forward(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        logit_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        work = batch.row_work
        if work.min() <= WALKED_WORK:
            self.short.forward(q, k_rows, v_rows, layer, batch, scale, logit_cap, out)
        if work.max() > WALKED_WORK:
            self.long.forward(q, k_rows, v_rows, layer, batch, scale, logit_cap, out)
        return out

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        return self.long.lse_of_lists(q, k_rows, layer, batch, scale, logit_cap)

    def warm_up(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        self.short.warm_up(dtype, head_dim, group)
