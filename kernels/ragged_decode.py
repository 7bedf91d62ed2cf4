"""Decode attention over ragged lists of KV rows: one query per request, long lists split over many programs.

A request's keys for one kv head are its listed rows and then its dense tail, taken as one list of ``listed + tail``
entries. The grid is fixed by shapes alone and the lists are cut into pieces on the device (``decode_plan``), so that
the launch needs no number from the host and can be recorded in a CUDA graph. Arguments are those of
``laprox_sglang.attention.base.RaggedBatch``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_plan import FIELDS, DecodePlan, pieces_for, plan_decode
from .launch import device_units, dot_precision, padded, widen_dots

BLOCK_N = 64
# A split shorter than this spends more on its partial result than it gains.
LEAST_SPLIT = 256
MOST_SPLITS = 64
# Rows are fetched through their ids: with 3 stages the ids are fetched one turn ahead of the rows (with 2, a turn of
# the loop would wait for its ids first), and rows one turn ahead of their use.
STAGES = 3
LOG2E = 1.4426950408889634


@triton.jit
def walk(
    q, limit, low, high, listed, k_ptr, v_ptr, rows_ptr, tail_ptr, first_row, heads, scale, cap,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_CAP: tl.constexpr, WITH_V: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax of q [BLOCK_M, BLOCK_D] over entries [low, high) of one list; query m sees those before limit[m].

    Returns acc [BLOCK_M, BLOCK_D] (not divided), total and the highest logit [BLOCK_M], logits in powers of 2.
    """
    d = tl.arange(0, BLOCK_D)
    if WIDEN:
        q = q.to(tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(low, high, BLOCK_N):
        i = first + tl.arange(0, BLOCK_N)
        inside = i < high
        row = tl.load(rows_ptr + i, mask=inside & (i < listed), other=0).to(tl.int64)
        slot = tl.load(tail_ptr + (i - listed), mask=inside & (i >= listed), other=0).to(tl.int64)
        at = tl.where(i < listed, row, slot * heads + first_row) * D
        k = tl.load(k_ptr + at[None, :] + d[:, None], mask=inside[None, :] & (d[:, None] < D), other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        logits = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_CAP:
            logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
        logits = tl.where(inside[None, :] & (i[None, :] < limit[:, None]), logits * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # a query that has seen nothing yet
        p = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        top = highest
        if WITH_V:
            v = tl.load(v_ptr + at[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
            if WIDEN:
                v = v.to(tl.float32)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, total, top


@triton.jit
def split_range(n, split, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """[low, high) of one of at most SPLITS splits of n entries; empty for a split that n does not need."""
    used = tl.minimum(tl.maximum(tl.cdiv(n, LEAST), 1), SPLITS)
    span = tl.cdiv(tl.cdiv(n, used), BLOCK_N) * BLOCK_N
    low = tl.minimum(split * span, n)
    return low, tl.minimum(low + span, n)


@triton.jit
def store_part(
    acc, total, top, acc_ptr, lse_ptr, at, mask,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the normalised part and its log2-sum-exp of query m at index at[m]; -inf where nothing was seen."""
    d = tl.arange(0, BLOCK_D)
    seen = top > float("-inf")
    divisor = tl.where(seen, total, 1.0)
    result = acc / divisor[:, None]
    tl.store(acc_ptr + at[:, None] * D + d[None, :], result, mask=(mask & seen)[:, None] & (d[None, :] < D))
    # NaN is neither seen nor -inf: it must not pass for an empty split.
    lse = tl.where(top == float("-inf"), float("-inf"), top + tl.log2(divisor))
    tl.store(lse_ptr + at, lse, mask=mask)


@triton.jit(do_not_specialize=["layer", "programs"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, indptr_ptr, slots_ptr, pool_index_ptr, tail_start_ptr, pieces_ptr,
    acc_ptr, lse_ptr, layer, heads, lists, slot_stride, q_stride_t, q_stride_h, slots_stride, programs, scale, cap,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FIELDS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (piece of the plan). acc [P, G, D] and lse [P, G] float32."""
    program = tl.program_id(0)
    piece = pieces_ptr + (layer.to(tl.int64) * programs + program) * FIELDS
    which, low, high = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    if which < 0:
        return
    h, b = which % heads, (which // heads).to(tl.int64)
    list_at = indptr_ptr + b * (lists + 1) + layer * heads + h
    start = tl.load(list_at)
    listed = (tl.load(list_at + 1) - start).to(tl.int32)
    g = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q_at = b * q_stride_t + (h * G + g[:, None]) * q_stride_h + d[None, :]
    q = tl.load(q_ptr + q_at, mask=(g[:, None] < G) & (d[None, :] < D), other=0.0).to(k_ptr.dtype.element_ty)
    limit = tl.full([BLOCK_M], 0, tl.int32) + high
    tail_ptr = slots_ptr + tl.load(pool_index_ptr + b) * slots_stride + tl.load(tail_start_ptr + b)
    first_row = layer.to(tl.int64) * slot_stride * heads + h
    acc, total, top = walk(
        q, limit, low, high, listed, k_ptr, v_ptr, rows_ptr + start, tail_ptr, first_row, heads, scale, cap,
        D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_CAP, True, PRECISION, WIDEN,
    )  # fmt: skip
    store_part(acc, total, top, acc_ptr, lse_ptr, program.to(tl.int64) * G + g, g < G, D, BLOCK_D)


@triton.jit(do_not_specialize=["layer", "count"])
def merge_pieces_kernel(
    acc_ptr, lse_ptr, first_ptr, out_ptr, out_stride_t, out_stride_h, layer, heads, count,
    G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Program (query head, request): join the pieces of its list. A list without any (graph padding) gives zeros."""
    i, b = tl.program_id(0), tl.program_id(1)
    first_ptr += layer.to(tl.int64) * (count + 1) + b * heads + i // G
    first, end = tl.load(first_ptr), tl.load(first_ptr + 1)
    d = tl.arange(0, BLOCK_D)
    top = tl.full([1], float("-inf"), tl.float32)
    divisor = tl.zeros([1], tl.float32)
    result = tl.zeros([BLOCK_D], tl.float32)
    for block in range(first, end, BLOCK_P):
        piece = block + tl.arange(0, BLOCK_P)
        at = piece.to(tl.int64) * G + i % G
        lse = tl.load(lse_ptr + at, mask=piece < end, other=float("-inf"))
        seen = lse != float("-inf")
        part = tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0)
        highest = tl.maximum(top, tl.max(lse, 0))
        weight = tl.where(seen, tl.exp2(lse - highest), 0.0)
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp2(top - highest))
        result = result * shrink + tl.sum(part * weight[:, None], 0)
        divisor = divisor * shrink + tl.sum(weight, 0)
        top = highest
    result = result / tl.where(divisor == 0.0, 1.0, divisor)
    out_at = b.to(tl.int64) * out_stride_t + i * out_stride_h + d
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["tokens"])
def merge_kernel(
    acc_ptr, lse_ptr, out_ptr, out_stride_t, out_stride_h, tokens, query_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (query head, token): join the SPLITS parts. A token that saw nothing (graph padding) gets zeros."""
    i, t = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    at = (s.to(tl.int64) * tokens + t) * query_heads + i
    lse = tl.load(lse_ptr + at)
    seen = lse != float("-inf")
    top = tl.max(lse, 0)
    weight = tl.where(seen, tl.exp2(lse - top), 0.0)
    part = tl.load(acc_ptr + at[:, None] * D + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0)
    divisor = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(divisor == 0.0, 1.0, divisor)
    out_at = t.to(tl.int64) * out_stride_t + i * out_stride_h + d
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=d < D)


def splits_for(programs: int, device: torch.device) -> int:
    """A power of 2 of splits that fills the device, with some to spare: heads keep very unequal numbers of rows."""
    return min(MOST_SPLITS, max(8, triton.next_power_of_2(triton.cdiv(4 * device_units(device), programs))))


def workspace_numel(tokens: int, query_heads: int, head_dim: int, splits: int) -> int:
    """float32 numbers that the parts of a call need."""
    return splits * tokens * query_heads * (head_dim + 1)


def divide_workspace(
    shape: tuple[int, ...], splits: int, workspace: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(acc, lse) views of the workspace, or new ones; shape (tokens or programs, heads, D) of one split's results."""
    tokens, query_heads, head_dim = shape
    numel = workspace_numel(tokens, query_heads, head_dim, splits)
    if workspace is None:
        workspace = torch.empty(numel, dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or workspace.numel() < numel:
        raise ValueError(f"the workspace must be float32 with at least {numel} numbers (see workspace_numel)")
    parts = splits * tokens * query_heads
    return workspace[: parts * head_dim], workspace[parts * head_dim : numel]


def check_inputs(q: Tensor, k_rows: Tensor, v_rows: Tensor) -> None:
    if not (k_rows.is_contiguous() and v_rows.is_contiguous() and q.stride(-1) == 1):
        raise ValueError("the pools must be contiguous, and q in its last dimension")
    if k_rows.shape[1] != q.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}, the pool {k_rows.shape[1]}")


def ragged_decode(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    layer: int,
    rows: Tensor,
    indptr: Tensor,
    slots: Tensor,
    pool_index: Tensor,
    tail_start: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    scale: float,
    logit_cap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention [B, Hq, D] of q [B, Hq, D], one new token per request, in q's dtype.

    ``plan``: that of this step (``plan_decode`` of the same lists and lengths with ``BLOCK_N``); it serves all layers.
    Without it each call plans for itself.
    With ``out``, ``workspace`` (float32, ``workspace_numel(P, G, D, 1)`` long for a plan of P programs) and ``plan``
    given it allocates nothing.
    """
    check_inputs(q, k_rows, v_rows)
    requests, query_heads, head_dim = q.shape
    group, lists = query_heads // num_kv_heads, indptr.shape[1] - 1
    out = torch.empty_like(q) if out is None else out
    if plan is None:
        wanted = pieces_for(requests * num_kv_heads, head_dim, q.device)
        plan = DecodePlan.empty(lists // num_kv_heads, requests * num_kv_heads, q.device, wanted)
        plan_decode(indptr, tail_start, seq_len, num_kv_heads, BLOCK_N, plan)
    acc, lse = divide_workspace((plan.programs, group, head_dim), 1, workspace, q.device)
    block_d = padded(head_dim)
    decode_kernel[(plan.programs,)](
        q, k_rows, v_rows, rows, indptr, slots, pool_index, tail_start, plan.pieces, acc, lse,
        layer, num_kv_heads, lists, k_rows.shape[0] // lists, q.stride(0), q.stride(1), slots.stride(0), plan.programs,
        scale, logit_cap,
        G=group, D=head_dim, BLOCK_M=padded(group), BLOCK_N=BLOCK_N, BLOCK_D=block_d,
        FIELDS=FIELDS, HAS_CAP=logit_cap > 0, PRECISION=dot_precision(k_rows),
        WIDEN=widen_dots(k_rows), num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    merge_pieces_kernel[(query_heads, requests)](
        acc, lse, plan.first, out, out.stride(0), out.stride(1), layer, num_kv_heads, requests * num_kv_heads,
        G=group, D=head_dim, BLOCK_D=block_d, BLOCK_P=16, num_warps=4,
    )  # fmt: skip
    return out


def ragged_decode_reference(
    q, k_rows, v_rows, layer, rows, indptr, slots, pool_index, tail_start, seq_len, num_kv_heads, scale, logit_cap=0.0
):  # type: ignore[no-untyped-def]
    """What ragged_decode computes, in plain torch."""
    out = torch.empty_like(q)
    lists, group = indptr.shape[1] - 1, q.shape[1] // num_kv_heads
    for b in range(q.shape[0]):
        tail = slots[pool_index[b], tail_start[b] : seq_len[b]].long()
        for h in range(num_kv_heads):
            at = layer * num_kv_heads + h
            dense = (layer * (k_rows.shape[0] // lists) + tail) * num_kv_heads + h
            every = torch.cat([rows[indptr[b, at] : indptr[b, at + 1]].long(), dense])
            logits = q[b, h * group : (h + 1) * group].float() @ k_rows[every].float().T * scale
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            out[b, h * group : (h + 1) * group] = (logits.softmax(-1) @ v_rows[every].float()).to(out.dtype)
    return out
