"""What the kernel benchmark runs: decode batches over ragged lists, and the kernels that read them or equal bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .decode_plan import DecodePlan, pieces_for, plan_decode
from .ragged_decode import BLOCK_N, ragged_decode, ragged_decode_reference, workspace_numel
from .shapes import ModelShape

LAYERS, LAYER = 2, 1
TAIL = 33  # a window of 32 tokens, and the new one
ITEM = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}


@dataclass
class DecodeCase:
    """One layer of a decode step. Tensors as in ``ragged_decode``; ``lengths`` [B, H]: rows of lists, tail apart."""

    shape: ModelShape
    lists: str
    lengths: Tensor
    q: Tensor
    k_rows: Tensor
    v_rows: Tensor
    rows: Tensor
    indptr: Tensor
    slots: Tensor
    pool_index: Tensor
    tail_start: Tensor
    seq_len: Tensor
    logit_cap: float = 0.0

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def entries(self) -> int:
        """Keys that the step reads, over all lists."""
        return int(self.lengths.sum()) + self.batch * self.shape.kv_heads * TAIL

    @property
    def bytes(self) -> int:
        """Keys and values: what every kernel has to move. Row ids and the like come on top, as overhead."""
        return self.entries * self.shape.head_dim * 2 * ITEM[self.k_rows.dtype]

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``ragged_decode`` and its reference."""
        pools = dict(q=self.q, k_rows=self.k_rows, v_rows=self.v_rows, layer=LAYER)
        lists = dict(rows=self.rows, indptr=self.indptr, slots=self.slots, pool_index=self.pool_index)
        lengths = dict(tail_start=self.tail_start, seq_len=self.seq_len, num_kv_heads=self.shape.kv_heads)
        return {**pools, **lists, **lengths, "scale": self.scale, "logit_cap": self.logit_cap}

    @cached_property
    def expected(self) -> Tensor:
        return ragged_decode_reference(**self.arguments)  # type: ignore[no-any-return]


def list_lengths(lists: str, batch: int, heads: int, mean: int, generator: torch.Generator) -> Tensor:
    """[B, H] int64 with the given mean, except for ``tiny``.

    ``ample`` and ``scattered``: all equal. ``skewed``: one list has 16 times the mean (or all, in a small batch) and
    the others share the rest. ``tiny``: 0 to 64 rows.
    """
    count = batch * heads
    if lists == "tiny":
        return torch.randint(0, 65, (batch, heads), generator=generator)
    lengths = torch.full((count,), mean, dtype=torch.int64)
    if lists == "skewed" and count > 1:
        longest = min(16 * mean, count * mean)
        lengths.fill_((count * mean - longest) // (count - 1))
        lengths[count // 2] = longest
    return lengths.view(batch, heads)


def make_case(
    shape: ModelShape,
    lists: str,
    batch: int,
    mean: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    logit_cap: float = 0.0,
) -> DecodeCase:
    """Lists lie side by side, as packing leaves them; ``scattered`` ones have their rows anywhere in the pool."""
    generator = torch.Generator().manual_seed(batch * 1000 + mean)
    heads, size = shape.kv_heads, shape.head_dim
    lengths = list_lengths(lists, batch, heads, mean, generator)
    per_layer = int(lengths.sum())
    tail_slots = batch * TAIL
    stride = 1 + tail_slots + -(-per_layer // heads)
    of_layer = torch.arange(per_layer) + (1 + tail_slots) * heads
    if lists == "scattered":
        of_layer = of_layer[torch.randperm(per_layer, generator=generator)]
    # The same lists in every layer; they stand by request, layer, head.
    of_list = of_layer.split(lengths.reshape(-1).tolist())
    parts = [
        of_list[b * heads + h] + layer * stride * heads
        for b in range(batch)
        for layer in range(LAYERS)
        for h in range(heads)
    ]
    rows = torch.cat(parts).to(torch.int32)
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    starts = torch.arange(batch)[:, None] * LAYERS * heads
    indptr = ends[starts + torch.arange(LAYERS * heads + 1)]
    slots = (1 + torch.randperm(tail_slots, generator=generator)).view(batch, TAIL).to(torch.int32)
    on_device = torch.Generator(device).manual_seed(1)
    k_rows, v_rows = (
        torch.randn(LAYERS * stride * heads, size, generator=on_device, device=device).to(dtype) for _ in range(2)
    )
    q = torch.randn(batch, shape.query_heads, size, generator=on_device, device=device).to(dtype)
    return DecodeCase(
        shape=shape,
        lists=lists,
        lengths=lengths,
        q=q,
        k_rows=k_rows,
        v_rows=v_rows,
        rows=rows.to(device),
        indptr=indptr.to(device),
        slots=slots.to(device),
        pool_index=torch.arange(batch, device=device),
        tail_start=torch.zeros(batch, dtype=torch.int64, device=device),
        seq_len=torch.full((batch,), TAIL, device=device),
        logit_cap=logit_cap,
    )


# Kernels: each makes what it needs once and returns a call whose result is checked before its time is taken

Call = Callable[[], Tensor]


def ours(case: DecodeCase) -> Call:
    """As a layer of a model runs it: the plan is made once for all layers, and timed by itself (``bench_compress``)."""
    heads, device = case.shape.kv_heads, case.q.device
    lists = case.batch * heads
    plan = DecodePlan.empty(LAYERS, lists, device, pieces_for(lists, case.shape.head_dim, device))
    plan_decode(case.indptr, case.tail_start, case.seq_len, heads, BLOCK_N, plan)
    numel = workspace_numel(plan.programs, case.shape.group, case.shape.head_dim, 1)
    workspace, out = torch.empty(numel, dtype=torch.float32, device=device), torch.empty_like(case.q)
    return lambda: ragged_decode(**case.arguments, out=out, workspace=workspace, plan=plan)


def list_of_rows(case: DecodeCase) -> tuple[Tensor, Tensor]:
    """(indptr [B * H + 1], rows) int32 of LAYER's lists with their tails, for kernels that read one list."""
    heads = case.shape.kv_heads
    stride = case.k_rows.shape[0] // (LAYERS * heads)
    parts = []
    for b in range(case.batch):
        tail = case.slots[case.pool_index[b], :TAIL].long()
        for h in range(heads):
            at = LAYER * heads + h
            listed = case.rows[case.indptr[b, at] : case.indptr[b, at] + case.lengths[b, h]]
            parts.append(torch.cat([listed.long(), (LAYER * stride + tail) * heads + h]))
    lengths = torch.tensor([0, *(len(part) for part in parts)])
    return lengths.cumsum(0).to(torch.int32), torch.cat(parts).to(torch.int32)


def flashinfer_lists(case: DecodeCase) -> Call:
    """FlashInfer on the same lists: pages of one token and one kv head."""
    indptr, rows = list_of_rows(case)
    group, size = case.shape.group, case.shape.head_dim
    run = _flashinfer(case, indptr, rows, group, 1)
    pools = tuple(pool.view(-1, 1, 1, size) for pool in (case.k_rows, case.v_rows))
    return lambda: run(case.q.view(-1, group, size), pools).view(case.q.shape)


@dataclass
class Uniform:
    """A dense batch that reads as many bytes as a case: T = B * n tokens, every head all of them."""

    indptr: Tensor
    slots: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def like(cls, case: DecodeCase) -> Uniform:
        heads, size = case.shape.kv_heads, case.shape.head_dim
        tokens = max(1, round(case.entries / (case.batch * heads)))
        total = tokens * case.batch
        shape = (total + 1, heads, size)
        k, v = (torch.randn(shape, device=case.q.device).to(case.k_rows.dtype) for _ in range(2))
        slots = torch.arange(1, total + 1, device=case.q.device)
        return cls(torch.arange(0, total + 1, tokens, dtype=torch.int32), slots, k, v)


def flashinfer_uniform(case: DecodeCase) -> Call:
    """FlashInfer's kernel where all heads keep the same tokens, on equal bytes."""
    dense = Uniform.like(case)
    run = _flashinfer(case, dense.indptr, dense.slots.to(torch.int32), case.shape.query_heads, case.shape.kv_heads)
    pools = dense.k[:, None], dense.v[:, None]
    return lambda: run(case.q, pools)


def _flashinfer(
    case: DecodeCase, indptr: Tensor, pages: Tensor, query_heads: int, kv_heads: int
) -> Callable[..., Tensor]:
    import flashinfer

    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=case.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=case.shape.group >= 4, backend="fa2"
    )
    last = torch.ones(len(indptr) - 1, dtype=torch.int32)
    types = dict(q_data_type=case.q.dtype, kv_data_type=case.k_rows.dtype)
    wrapper.plan(indptr, pages, last, query_heads, kv_heads, case.shape.head_dim, 1, sm_scale=case.scale, **types)
    return wrapper.run  # type: ignore[no-any-return]


def sglang_uniform(case: DecodeCase) -> Call:
    """SGLang's Triton decode on equal bytes, with as many splits as its backend allows by default."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    dense, splits = Uniform.like(case), 8
    out, device = torch.empty_like(case.q), case.q.device
    partial = torch.empty((*case.q.shape[:2], splits, case.shape.head_dim), device=device)
    lse = torch.empty((*case.q.shape[:2], splits), device=device)
    counts = torch.full((case.batch,), splits, dtype=torch.int32, device=device)
    indptr = dense.indptr.to(device)

    def call() -> Tensor:
        arguments = (indptr, dense.slots, partial, lse, counts, splits, case.scale, 1.0, 1.0)
        decode_attention_fwd(case.q, dense.k, dense.v, out, *arguments)
        return out

    return call


# (name, what it needs, how it is made, whether its result is that of our lists)
KERNELS: tuple[tuple[str, str | None, Callable[[DecodeCase], Call], bool], ...] = (
    ("ragged_decode", None, ours, True),
    ("FlashInfer, same lists", "flashinfer", flashinfer_lists, True),
    ("FlashInfer, uniform", "flashinfer", flashinfer_uniform, False),
    ("SGLang Triton, uniform", "sglang", sglang_uniform, False),
)
