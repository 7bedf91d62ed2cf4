"""Ragged attention with FlashInfer's paged kernels (``--laprox-kernels flashinfer``). No GPU has run this yet.

Rows are FlashInfer's paged layout with pages of one token and one kv head: each (request, kv head) is a request of
theirs with G query heads. Their kernels read one list of page ids per request, so here the dense tail is listed too,
per head, and every layer is planned by itself, because its lists have lengths of their own. Plans are made from
lengths that the host knows; making one does not wait for the device.

Facts of FlashInfer 0.7.2 behind the choices below: decode on CUDA cores has the group sizes of
``DISPATCH_GQA_GROUP_SIZE`` (include/flashinfer/utils.cuh), decode on tensor cores is its prefill kernel and takes any;
page addresses are 64-bit products of int32 page ids (include/flashinfer/page.cuh); the offsets of a plan are int32.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch, upload

HEAD_DIMS = (64, 128, 256)
CUDA_CORE_GROUPS = (1, 2, 3)  # from 4 on tensor cores are faster, and they take every group size
INT32_MAX = 2**31 - 1
WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class PlanInputs:
    """One layer's lists as FlashInfer's requests, request by request and head by head. On the host, int32.

    Attributes:
        kv_indptr: ``[B * H + 1]`` offsets of the lists' row ids, tails included.
        q_indptr: ``[B * H + 1]`` offsets of the queries.
    """

    kv_indptr: np.ndarray
    q_indptr: np.ndarray

    @property
    def last_page_len(self) -> np.ndarray:
        return np.ones(len(self.kv_indptr) - 1, dtype=np.int32)


def plan_inputs(batch: RaggedBatch, layer: int) -> PlanInputs:
    """Raises ValueError for lists that int32 offsets cannot address."""
    heads = batch.num_kv_heads
    indptr = batch.indptr_host[:, layer * heads : (layer + 1) * heads + 1]
    lengths = np.diff(indptr, axis=1) + (batch.seq_len_host - batch.tail_start_host)[:, None]
    ends = np.cumsum(lengths.reshape(-1))
    if ends[-1] > INT32_MAX:
        raise ValueError(
            f"layer {layer} of this batch reads {ends[-1]} rows, more than FlashInfer's int32 offsets address; "
            "use --laprox-kernels triton"
        )
    queries = np.cumsum(np.repeat(batch.q_len_host, heads))
    return PlanInputs(*(np.concatenate([[0], each]).astype(np.int32) for each in (ends, queries)))


def row_indices(batch: RaggedBatch, layer: int, slot_stride: int, kv_indptr: np.ndarray) -> Tensor:
    """``[kv_indptr[-1]]`` int32 row ids of one layer's lists: listed rows, then the tail's own rows. On the device."""
    device, heads = batch.indptr.device, batch.num_kv_heads
    indptr = batch.indptr[:, layer * heads : (layer + 1) * heads + 1]
    start, listed = indptr[:, :-1].reshape(-1), indptr.diff(dim=1).reshape(-1)
    ends = upload(kv_indptr.astype(np.int64), device)
    total = int(kv_indptr[-1])
    owner = torch.repeat_interleave(torch.arange(len(kv_indptr) - 1, device=device), ends.diff(), output_size=total)
    index = torch.arange(total, device=device) - ends[owner]
    index_in_tail = index - listed[owner]
    request, head = owner // heads, owner % heads
    is_listed = index_in_tail < 0
    # Both are read for every entry; the one that does not apply reads its first element.
    position = batch.tail_start[request] + index_in_tail.clamp_min(0)
    slot = batch.slots[batch.pool_index[request], position].long()
    own = (layer * slot_stride + slot) * heads + head
    if not batch.rows.numel():
        return own.to(torch.int32)
    return torch.where(is_listed, batch.rows[torch.where(is_listed, start[owner] + index, 0)], own).to(torch.int32)


def query_order(batch: RaggedBatch) -> np.ndarray:
    """``[T * H]`` int64: which (token, kv head) of q, seen as [T * H, G, D], is FlashInfer's i-th query."""
    heads = np.arange(batch.num_kv_heads)
    parts = []
    for first, last in zip(batch.q_start_host[:-1], batch.q_start_host[1:], strict=True):
        parts.append((np.arange(first, last)[None, :] * batch.num_kv_heads + heads[:, None]).reshape(-1))
    return np.concatenate(parts)


class Wrappers:
    """FlashInfer wrappers of one kind, handed out round robin as they become free.

    A plan is copied to the device from the wrapper's own pinned buffer. Planning again before that copy is done would
    overwrite it, so a wrapper is free only when the device has passed the event behind its last use.
    """

    def __init__(self, make: Callable[[], Any], make_event: Callable[[], Any]):
        self._make = make
        self._make_event = make_event
        self._used: list[tuple[Any, Any]] = []

    def take(self) -> Any:
        # Oldest first: events of one stream complete in order.
        if self._used and self._used[0][1].query():
            return self._used.pop(0)[0]
        return self._make()

    def give_back(self, wrapper: Any) -> None:
        event = self._make_event()
        event.record()
        self._used.append((wrapper, event))


class FlashInferRaggedAttention(RaggedAttention):
    """Decode and prefill wrappers. ``lse_of_lists``, which they have no kernel for, is the Triton one."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[str, bool], Wrappers] = {}
        self._order: tuple[RaggedBatch, Tensor] | None = None

    def refusal(self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer-python is not installed"
        if dtype not in (torch.float16, torch.bfloat16):
            return (
                f"FlashInfer's tensor core kernels read float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
            )
        if head_dim not in HEAD_DIMS:
            return f"FlashInfer has head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        if query_heads % kv_heads:
            return f"{query_heads} query heads are no whole groups of {kv_heads} kv heads"
        return None

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
        tokens, query_heads, head_dim = q.shape
        heads = batch.num_kv_heads
        inputs = plan_inputs(batch, layer)
        indices = row_indices(batch, layer, batch.slot_stride(k_rows), inputs.kv_indptr)
        queries = q.reshape(tokens * heads, query_heads // heads, head_dim).to(k_rows.dtype)
        pools = tuple(rows.view(-1, 1, 1, head_dim) for rows in (k_rows, v_rows))
        out = torch.empty_like(q) if out is None else out
        if tokens == batch.size:
            result = self.decode(queries, pools, inputs, indices, scale, logit_cap)
        else:
            order = self._query_order(batch)
            result = torch.empty_like(queries)
            result[order] = self.prefill(queries[order], pools, inputs, indices, scale, logit_cap)
        out.copy_(result.view(tokens, query_heads, head_dim))
        return out

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        from laprox_sglang.kernels.ragged_extend import ragged_lse

        return ragged_lse(q, k_rows, layer, batch.rows, batch.indptr, batch.num_kv_heads, scale, logit_cap)

    # What FlashInfer does: queries [N, G, D] in its order -> [N, G, D]

    def decode(
        self,
        queries: Tensor,
        pools: tuple[Tensor, ...],
        inputs: PlanInputs,
        indices: Tensor,
        scale: float,
        logit_cap: float,
    ) -> Tensor:
        group, head_dim = queries.shape[1:]
        wrappers = self._of_kind("decode", group not in CUDA_CORE_GROUPS, queries.device)
        wrapper = wrappers.take()
        wrapper.plan(
            pinned(inputs.kv_indptr, queries.device),
            indices,
            pinned(inputs.last_page_len, queries.device),
            group,
            1,
            head_dim,
            1,
            **self._options(queries, pools, scale, logit_cap),
        )
        result = wrapper.run(queries, pools)
        wrappers.give_back(wrapper)
        return result

    def prefill(
        self,
        queries: Tensor,
        pools: tuple[Tensor, ...],
        inputs: PlanInputs,
        indices: Tensor,
        scale: float,
        logit_cap: float,
    ) -> Tensor:
        group, head_dim = queries.shape[1:]
        wrappers = self._of_kind("prefill", True, queries.device)
        wrapper = wrappers.take()
        wrapper.plan(
            pinned(inputs.q_indptr, queries.device),
            pinned(inputs.kv_indptr, queries.device),
            indices,
            pinned(inputs.last_page_len, queries.device),
            group,
            1,
            head_dim,
            1,
            causal=True,
            **self._options(queries, pools, scale, logit_cap),
        )
        result = wrapper.run(queries, pools)
        wrappers.give_back(wrapper)
        return result

    @staticmethod
    def _options(queries: Tensor, pools: tuple[Tensor, ...], scale: float, logit_cap: float) -> dict[str, Any]:
        return dict(
            sm_scale=scale,
            logits_soft_cap=logit_cap if logit_cap > 0 else None,
            q_data_type=queries.dtype,
            kv_data_type=pools[0].dtype,
            non_blocking=True,
        )

    def _of_kind(self, kind: str, tensor_cores: bool, device: torch.device) -> Wrappers:
        if (kind, tensor_cores) not in self._wrappers:
            self._wrappers[kind, tensor_cores] = Wrappers(
                lambda: self._make(kind, tensor_cores, device), lambda: torch.cuda.Event()
            )
        return self._wrappers[kind, tensor_cores]

    def _make(self, kind: str, tensor_cores: bool, device: torch.device) -> Any:
        import flashinfer

        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # fa2: the one backend that has pages of one token on every device; what "auto" picks differs by device.
        if kind == "prefill":
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
        )

    def _query_order(self, batch: RaggedBatch) -> Tensor:
        """Made once for all layers of a batch."""
        if self._order is None or self._order[0] is not batch:
            self._order = batch, upload(query_order(batch), batch.indptr.device)
        return self._order[1]


def pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """On the host, in memory that a copy to the device does not have to wait for."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor
