"""Attention of many new tokens per request over ragged lists of KV rows, causal over the dense tail, and the
log-sum-exp of queries over the lists alone. Lists, walk and merge are those of ``ragged_decode``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dot_precision, padded, widen_dots
from .ragged_decode import (
    BLOCK_N,
    LEAST_SPLIT,
    LOG2E,
    STAGES,
    check_inputs,
    divide_workspace,
    merge_kernel,
    split_range,
    splits_for,
    store_part,
    walk,
)

BLOCK_M = 64
WARPS = 8  # with 4, compute capability 8.0 spills registers


@triton.jit(do_not_specialize=["layer", "tokens"])
def extend_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, indptr_ptr, slots_ptr, pool_index_ptr, tail_start_ptr, seq_len_ptr, q_start_ptr,
    out_ptr, acc_ptr, lse_ptr, layer, heads, lists, slot_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    slots_stride, tokens, scale, cap,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, HAS_CAP: tl.constexpr, TAIL: tl.constexpr, WITH_V: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (block of queries and split, kv head, request). Query m of a request is new token m // G, head m % G.

    With one split the result goes to out [T, Hq, D], otherwise its parts to acc [SPLITS, T, Hq, D] and lse
    [SPLITS, T, Hq]. Without TAIL only the listed rows are seen; without WITH_V only lse is written.
    """
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    h, b = tl.program_id(1), tl.program_id(2)
    first_token = tl.load(q_start_ptr + b)
    new = (tl.load(q_start_ptr + b + 1) - first_token).to(tl.int32)
    if block * BLOCK_M >= new * G:
        return
    list_at = indptr_ptr + b.to(tl.int64) * (lists + 1) + layer * heads + h
    start = tl.load(list_at)
    listed = (tl.load(list_at + 1) - start).to(tl.int32)

    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < new * G
    d = tl.arange(0, BLOCK_D)
    t, i = m // G, h * G + m % G
    q_at = (first_token + t) * q_stride_t + i * q_stride_h
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    q = q.to(k_ptr.dtype.element_ty)

    if TAIL:
        tail_start = tl.load(tail_start_ptr + b)
        older = listed + (tl.load(seq_len_ptr + b) - tail_start).to(tl.int32) - new
        limit = tl.where(valid, older + t + 1, 0)
        n = older + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // G + 1, new)  # what the block's last token sees
        tail_ptr = slots_ptr + tl.load(pool_index_ptr + b) * slots_stride + tail_start
    else:
        limit = tl.where(valid, listed, 0)
        n = listed
        tail_ptr = slots_ptr
    low, high = split_range(n, split, SPLITS, LEAST, BLOCK_N)
    acc, total, top = walk(
        q, limit, low, high, listed, k_ptr, v_ptr, rows_ptr + start, tail_ptr,
        layer.to(tl.int64) * slot_stride * heads + h, heads, scale, cap,
        D, BLOCK_M, BLOCK_N, BLOCK_D, HAS_CAP, WITH_V, PRECISION, WIDEN,
    )  # fmt: skip
    at = (split.to(tl.int64) * tokens + first_token + t) * (heads * G) + i
    if not WITH_V:
        lse = tl.where(top == float("-inf"), float("-inf"), top + tl.log2(total))
        tl.store(lse_ptr + at, lse, mask=valid)
    elif SPLITS == 1:
        out_at = ((first_token + t) * out_stride_t + i * out_stride_h)[:, None] + d[None, :]
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_at, result, mask=valid[:, None] & (d[None, :] < D))
    else:
        store_part(acc, total, top, acc_ptr, lse_ptr, at, valid, D, BLOCK_D)


def ragged_extend(
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
    q_start: Tensor,
    most_new: int,
    num_kv_heads: int,
    scale: float,
    logit_cap: float = 0.0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention [T, Hq, D] of all requests' new tokens q [T, Hq, D], in q's dtype.

    ``most_new``: the most new tokens of a request (a host number: it sizes the grid). ``splits``, a power of 2, spreads
    long lists over more programs; by default only where the queries alone do not fill the device.
    """
    check_inputs(q, k_rows, v_rows)
    tokens, query_heads, head_dim = q.shape
    requests, lists = indptr.shape[0], indptr.shape[1] - 1
    group = query_heads // num_kv_heads
    out = torch.empty_like(q) if out is None else out
    blocks = triton.cdiv(most_new * group, BLOCK_M)
    if splits is None:
        programs = blocks * num_kv_heads * requests
        splits = splits_for(programs, q.device) if programs < 64 else 1
    # One split writes to out; acc and lse are then never touched.
    acc, lse = (out, out) if splits == 1 else divide_workspace(q.shape, splits, workspace, q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    extend_kernel[(blocks * splits, num_kv_heads, requests)](
        q, k_rows, v_rows, rows, indptr, slots, pool_index, tail_start, seq_len, q_start, out, acc, lse,
        layer, num_kv_heads, lists, k_rows.shape[0] // lists, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        slots.stride(0), tokens, scale, logit_cap,
        G=group, D=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=block_d, SPLITS=splits, LEAST=LEAST_SPLIT,
        HAS_CAP=logit_cap > 0, TAIL=True, WITH_V=True, PRECISION=dot_precision(k_rows),
        WIDEN=widen_dots(k_rows), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(query_heads, tokens)](
            acc, lse, out, out.stride(0), out.stride(1), tokens, query_heads,
            D=head_dim, BLOCK_D=block_d, SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out


def ragged_lse(
    q: Tensor,
    k_rows: Tensor,
    layer: int,
    rows: Tensor,
    indptr: Tensor,
    num_kv_heads: int,
    scale: float,
    logit_cap: float = 0.0,
) -> Tensor:
    """[B, W, Hq] float32: log-sum-exp of q [B, W, Hq, D] over the listed rows only; -inf for an empty list."""
    requests, window, query_heads, head_dim = q.shape
    q = q.reshape(-1, query_heads, head_dim)
    check_inputs(q, k_rows, k_rows)
    lists, group = indptr.shape[1] - 1, query_heads // num_kv_heads
    q_start = torch.arange(0, requests * window + 1, window, device=q.device)
    lse = torch.empty(requests, window, query_heads, dtype=torch.float32, device=q.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    extend_kernel[(triton.cdiv(window * group, BLOCK_M), num_kv_heads, requests)](
        q, k_rows, k_rows, rows, indptr, rows, q_start, q_start, q_start, q_start, lse, lse, lse,
        layer, num_kv_heads, lists, k_rows.shape[0] // lists, q.stride(0), q.stride(1), 0, 0, 0, q.shape[0],
        scale, logit_cap,
        G=group, D=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=block_d, SPLITS=1, LEAST=LEAST_SPLIT,
        HAS_CAP=logit_cap > 0, TAIL=False, WITH_V=False, PRECISION=dot_precision(k_rows),
        WIDEN=widen_dots(k_rows), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return lse.div_(LOG2E)


def ragged_lse_of_layers(
    q: Tensor,
    k_rows: Tensor,
    rows: Tensor,
    indptr: Tensor,
    num_kv_heads: int,
    scale: float,
    logit_cap: float = 0.0,
) -> Tensor:
    """[L, H, G, W] float32: as ``ragged_lse``, of one request's queries q [L, W, Hq, D] in all layers, in one launch.

    indptr: [L * H + 1] int64, contiguous. To the kernel each layer is a request whose lists are its H lists.
    """
    layers, window, query_heads, head_dim = q.shape
    q = q.reshape(-1, query_heads, head_dim)
    check_inputs(q, k_rows, k_rows)
    group = query_heads // num_kv_heads
    q_start = torch.arange(0, layers * window + 1, window, device=q.device)
    lse = torch.empty(layers, window, num_kv_heads, group, dtype=torch.float32, device=q.device)
    extend_kernel[(triton.cdiv(window * group, BLOCK_M), num_kv_heads, layers)](
        q, k_rows, k_rows, rows, indptr, rows, q_start, q_start, q_start, q_start, lse, lse, lse,
        0, num_kv_heads, num_kv_heads - 1, 0, q.stride(0), q.stride(1), 0, 0, 0, q.shape[0],
        scale, logit_cap,
        G=group, D=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=padded(head_dim), SPLITS=1, LEAST=LEAST_SPLIT,
        HAS_CAP=logit_cap > 0, TAIL=False, WITH_V=False, PRECISION=dot_precision(k_rows),
        WIDEN=widen_dots(k_rows), num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return lse.div_(LOG2E).permute(0, 2, 3, 1)


def ragged_extend_reference(
    q, k_rows, v_rows, layer, rows, indptr, slots, pool_index, tail_start, seq_len, q_start, num_kv_heads, scale,
    logit_cap=0.0,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """What ragged_extend computes, in plain torch."""
    out = torch.empty_like(q)
    lists, group = indptr.shape[1] - 1, q.shape[1] // num_kv_heads
    for b in range(indptr.shape[0]):
        tokens = slice(int(q_start[b]), int(q_start[b + 1]))
        new = tokens.stop - tokens.start
        tail = slots[pool_index[b], tail_start[b] : seq_len[b]].long()
        for h in range(num_kv_heads):
            at = layer * num_kv_heads + h
            dense = (layer * (k_rows.shape[0] // lists) + tail) * num_kv_heads + h
            every = torch.cat([rows[indptr[b, at] : indptr[b, at + 1]].long(), dense])
            of_head = slice(h * group, (h + 1) * group)
            logits = torch.einsum("tgd,nd->gtn", q[tokens, of_head].float(), k_rows[every].float()) * scale
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            hidden = torch.ones(new, len(every), dtype=torch.bool, device=q.device).triu(len(every) - new + 1)
            weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            out[tokens, of_head] = torch.einsum("gtn,nd->tgd", weights, v_rows[every].float()).to(out.dtype)
    return out


def ragged_lse_reference(q, k_rows, layer, rows, indptr, num_kv_heads, scale, logit_cap=0.0):  # type: ignore[no-untyped-def]
    """What ragged_lse computes, in plain torch."""
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    group = q.shape[2] // num_kv_heads
    for b in range(indptr.shape[0]):
        for h in range(num_kv_heads):
            at = layer * num_kv_heads + h
            keys = k_rows[rows[indptr[b, at] : indptr[b, at + 1]].long()].float()
            logits = q[b, :, h * group : (h + 1) * group].float() @ keys.T * scale
            if logit_cap > 0:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            lse[b, :, h * group : (h + 1) * group] = logits.logsumexp(-1)
    return lse
