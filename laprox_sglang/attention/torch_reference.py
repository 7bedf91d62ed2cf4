"""Ragged attention in plain torch: the oracle of the tests, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch


def capped(logits: Tensor, logit_cap: float) -> Tensor:
    return torch.tanh(logits / logit_cap) * logit_cap if logit_cap > 0 else logits


def listed_rows(batch: RaggedBatch, request: int, layer: int, head: int) -> Tensor:
    """[n] int64: the listed row ids of one (request, layer, kv head)."""
    at = layer * batch.num_kv_heads + head
    return batch.rows[int(batch.indptr_host[request, at]) : int(batch.indptr_host[request, at + 1])].long()


def tail_slots(batch: RaggedBatch, request: int) -> Tensor:
    """[tail length] int64: slots of one request's dense tokens, by position."""
    start, end = int(batch.tail_start_host[request]), int(batch.seq_len_host[request])
    return batch.slots[batch.pool_index[request], start:end].long()


class TorchRaggedAttention(RaggedAttention):
    """Loops over requests and kv heads. ``dtype`` is what it computes in; float64 makes it an oracle."""

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.dtype = dtype

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
        heads, group = batch.num_kv_heads, q.shape[1] // batch.num_kv_heads
        stride = batch.slot_stride(k_rows)
        for request in range(batch.size):
            first, last = int(batch.q_start_host[request]), int(batch.q_start_host[request + 1])
            tokens = slice(first, last)
            slots = tail_slots(batch, request)
            # Bottom-right causal: the i-th new token from the end does not see the last i tail tokens.
            seen = torch.ones(last - first, len(slots), dtype=torch.bool, device=q.device)
            seen = seen.tril(len(slots) - (last - first))
            for head in range(heads):
                listed = listed_rows(batch, request, layer, head)
                rows = torch.cat([listed, (layer * stride + slots) * heads + head])
                queries = slice(head * group, (head + 1) * group)
                logits = torch.einsum("tgd,nd->tgn", q[tokens, queries].to(self.dtype), k_rows[rows].to(self.dtype))
                logits = capped(logits * scale, logit_cap)
                logits[:, :, len(listed) :].masked_fill_(~seen[:, None, :], float("-inf"))
                weights = torch.softmax(logits, dim=-1)
                result = torch.einsum("tgn,nd->tgd", weights, v_rows[rows].to(self.dtype))
                out[tokens, queries] = result.to(out.dtype)
        return out

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        requests, window, query_heads, _ = q.shape
        group = query_heads // batch.num_kv_heads
        lse = torch.empty(requests, window, query_heads, dtype=torch.float32, device=q.device)
        for request in range(requests):
            for head in range(batch.num_kv_heads):
                keys = k_rows[listed_rows(batch, request, layer, head)].to(self.dtype)
                queries = slice(head * group, (head + 1) * group)
                logits = torch.einsum("wgd,nd->wgn", q[request, :, queries].to(self.dtype), keys)
                lse[request, :, queries] = torch.logsumexp(capped(logits * scale, logit_cap), dim=-1).float()
        return lse
