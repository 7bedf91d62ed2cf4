"""Ragged attention with the project's Triton kernels: the default on CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.kernels.decode_plan import DecodePlan, pieces_for, plan_decode
from laprox_sglang.kernels.ragged_decode import BLOCK_N, ragged_decode, workspace_numel
from laprox_sglang.kernels.ragged_extend import ragged_extend, ragged_lse


class TritonRaggedAttention(RaggedAttention):
    """A batch with one new token per request runs the decode kernel, any other the extend kernel.

    Workspaces and plans of the decode kernel are made once for each size and kept: a recorded CUDA graph may hold them.
    """

    name = "triton"
    needs_host_lists = False
    recordable = True

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}
        self._plans: dict[tuple[torch.device, int, int], DecodePlan] = {}
        self._planned: Callable[[], RaggedBatch | None] = lambda: None

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
            plan = self._plan_for(batch, layer, q.shape[2])
            workspace = self._workspace_for(q, workspace_numel(plan.programs, q.shape[1] // heads, q.shape[2], 1))
            return ragged_decode(*pools, *lists, heads, scale, logit_cap, out, workspace, plan)
        most_new = int(batch.q_len_host.max())
        return ragged_extend(*pools, *lists, batch.q_start, most_new, heads, scale, logit_cap, out)

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        return ragged_lse(q, k_rows, layer, batch.rows, batch.indptr, batch.num_kv_heads, scale, logit_cap)

    def _plan_for(self, batch: RaggedBatch, layer: int, head_dim: int) -> DecodePlan:
        """The plan of the batch's step, for all layers. The first layer makes it anew: a static batch of a CUDA graph
        is the same object in every step, and a graph that is replayed must plan again."""
        device, lists = batch.indptr.device, batch.size * batch.num_kv_heads
        key = (device, batch.num_layers, lists)
        if key not in self._plans:
            wanted = pieces_for(lists, head_dim, device)
            self._plans[key] = DecodePlan.empty(batch.num_layers, lists, device, wanted)
        plan = self._plans[key]
        if layer == 0 or self._planned() is not batch:
            plan_decode(batch.indptr, batch.tail_start, batch.seq_len, batch.num_kv_heads, BLOCK_N, plan)
            self._planned = weakref.ref(batch)
        return plan

    def _workspace_for(self, q: Tensor, numel: int) -> Tensor:
        size = 1 << (numel - 1).bit_length()
        if (q.device, size) not in self._workspaces:
            self._workspaces[q.device, size] = torch.empty(size, dtype=torch.float32, device=q.device)
        return self._workspaces[q.device, size]
