"""Ragged attention with the project's Triton kernels: the default on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.kernels.ragged_decode import ragged_decode, splits_for, workspace_numel
from laprox_sglang.kernels.ragged_extend import ragged_extend, ragged_lse


class TritonRaggedAttention(RaggedAttention):
    """A batch with one new token per request runs the decode kernel, any other the extend kernel.

    Workspaces of the decode kernel are made once for each power of 2 and kept: a recorded CUDA graph may hold them.
    """

    name = "triton"
    needs_host_lists = False
    recordable = True

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}

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
        pools = (q, k_rows, v_rows, layer)
        lists = (batch.rows, batch.indptr, batch.slots, batch.pool_index, batch.tail_start, batch.seq_len)
        heads = batch.num_kv_heads
        # A shape, not a host value: this also holds for the static batch of a CUDA graph.
        if q.shape[0] == batch.size:
            splits = splits_for(batch.size * heads, q.device)
            workspace = self._workspace_for(q, splits)
            return ragged_decode(*pools, *lists, heads, scale, logit_cap, out, workspace, splits)
        most_new = int(batch.q_len_host.max())
        return ragged_extend(*pools, *lists, batch.q_start, most_new, heads, scale, logit_cap, out)

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        return ragged_lse(q, k_rows, layer, batch.rows, batch.indptr, batch.num_kv_heads, scale, logit_cap)

    def _workspace_for(self, q: Tensor, splits: int) -> Tensor:
        size = 1 << (workspace_numel(*q.shape, splits) - 1).bit_length()
        if (q.device, size) not in self._workspaces:
            self._workspaces[q.device, size] = torch.empty(size, dtype=torch.float32, device=q.device)
        return self._workspaces[q.device, size]
