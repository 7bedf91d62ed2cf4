"""The attention factor of a score: L2 norms of the window attention's columns, which is never written to memory.

Two passes over the keys of all layers: ``window_lse`` finds every query's log-sum-exp, ``column_norms`` forms each
probability in registers, squares it and sums over the window. ``pooled_scores`` averages over neighbouring tokens and
joins the other factor (``projected_norm``). Keys are read in place through their slots.

W window queries end at the last of n dense tokens: query w sees the first ``n - W + 1 + w`` of them. Query heads of a
kv head are side by side. Source: arXiv 2605.07234; its column norm ``||A[:, t]||_2``, scaled for the window's own
tokens by sqrt(W / queries that see them).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import device_units, dot_precision, padded, widen_dots

BLOCK_M = 64
BLOCK_N = 64
BLOCK_T = 128
BLOCK_W = 32
BLOCK_POOL = 512
STAGES = 3  # as in ragged_decode: slots are fetched one turn ahead of the keys
# Programs per multiprocessor that the first pass splits for, and the fewest token blocks that are worth a split.
WAVES = 4
LEAST_BLOCKS = 8


@triton.jit(do_not_specialize=["n", "W"])
def window_lse_kernel(
    q_ptr, k_ptr, slots_ptr, lse_ptr, n, W, heads,
    q_stride_l, q_stride_w, q_stride_h, k_stride_l, k_stride_s, scale, cap,
    G: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (block of queries and split, kv head, layer). Row m is head m // W of the group and query m % W.

    lse [SPLITS, L, H, G * W] float32, natural; -inf where a split holds nothing that the query sees.
    """
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    h, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    span = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK_N) * BLOCK_N
    low = tl.minimum(split * span, n)
    high = tl.minimum(low + span, n)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    valid = m < G * W
    q_at = layer * q_stride_l + (m % W) * q_stride_w + (h * G + m // W) * q_stride_h
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < D), other=0.0)
    q = q.to(k_ptr.dtype.element_ty)
    if WIDEN:
        q = q.to(tl.float32)
    limit = n - W + 1 + m % W
    k_layer = k_ptr + layer * k_stride_l + h * D
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(low, high, BLOCK_N):
        t = first + tl.arange(0, BLOCK_N)
        inside = t < high
        slot = tl.load(slots_ptr + t, mask=inside, other=0).to(tl.int64)
        k = tl.load(
            k_layer + (slot * k_stride_s)[None, :] + d[:, None], mask=inside[None, :] & (d[:, None] < D), other=0.0
        )
        if WIDEN:
            k = k.to(tl.float32)
        logits = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_CAP:
            logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
        logits = tl.where(inside[None, :] & (t[None, :] < limit[:, None]), logits * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        top = highest
    # NaN is neither seen nor -inf: it must not pass for an empty split.
    lse = tl.where(top == float("-inf"), float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    at = ((split.to(tl.int64) * tl.num_programs(2) + layer) * heads + h) * (G * W) + m
    tl.store(lse_ptr + at, lse, mask=valid)


@triton.jit(do_not_specialize=["n", "first", "W", "lse_stride_l", "lse_stride_h", "lse_stride_g"])
def column_norms_kernel(
    q_ptr, k_ptr, slots_ptr, lse_ptr, out_ptr, n, first, W, heads, lse_stride_l, lse_stride_h, lse_stride_g,
    q_stride_l, q_stride_w, q_stride_h, k_stride_l, k_stride_s, scale, cap,
    G: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr, MEAN: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, kv head, layer): tokens are the rows of the product, so that the sum over the window
    stays within a thread's row. out [L, H, 1 or G, n - first] float32."""
    h, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = first + tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = t < n
    slot = tl.load(slots_ptr + t, mask=inside, other=0).to(tl.int64)
    k_at = layer * k_stride_l + slot * k_stride_s + h * D
    k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    element = k.dtype
    if WIDEN:
        k = k.to(tl.float32)
    share = W / tl.maximum(tl.minimum(n - t, W), 1)
    mean = tl.zeros([BLOCK_T], tl.float32)
    of_list = layer * heads + h
    for g in range(G):
        squares = tl.zeros([BLOCK_T], tl.float32)
        for first_query in range(0, W, BLOCK_W):
            w = first_query + tl.arange(0, BLOCK_W)
            q_at = layer * q_stride_l + w * q_stride_w + (h * G + g) * q_stride_h
            q = tl.load(q_ptr + q_at[None, :] + d[:, None], mask=(w[None, :] < W) & (d[:, None] < D), other=0.0)
            q = q.to(element)
            if WIDEN:
                q = q.to(tl.float32)
            lse = tl.load(
                lse_ptr + layer * lse_stride_l + h * lse_stride_h + g * lse_stride_g + w, mask=w < W, other=0.0
            )
            logits = tl.dot(k, q, input_precision=PRECISION) * scale
            if HAS_CAP:
                logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
            p = tl.exp2((logits - lse[None, :]) * 1.4426950408889634)
            p = tl.where((w[None, :] < W) & (t[:, None] < n - W + 1 + w[None, :]), p, 0.0)
            squares += tl.sum(p * p, 1)
        norm = tl.sqrt(squares * share)
        if MEAN:
            mean += norm
        else:
            tl.store(out_ptr + (of_list * G + g) * (n - first) + t - first, norm, mask=inside)
    if MEAN:
        tl.store(out_ptr + of_list * (n - first) + t - first, mean / G, mask=inside)


@triton.jit(do_not_specialize=["n"])
def pooled_scores_kernel(
    attention_ptr, norms_ptr, out_ptr, n,
    GROUPS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, list). attention and norms [lists, GROUPS, n], out [lists, n], all float32."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1).to(tl.int64)
    inside = t < n
    count = tl.minimum(t + KERNEL // 2 + 1, n) - tl.maximum(t - KERNEL // 2, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for g in range(GROUPS):
        row = (at * GROUPS + g) * n
        around = tl.zeros([BLOCK], tl.float32)
        for j in range(KERNEL):
            near = t + j - KERNEL // 2
            around += tl.load(attention_ptr + row + near, mask=inside & (near >= 0) & (near < n), other=0.0)
        total += around / count.to(tl.float32) * tl.load(norms_ptr + row + t, mask=inside, other=0.0)
    tl.store(out_ptr + at * n + t, total / GROUPS, mask=inside)


def check_window(q: Tensor, k: Tensor, slots: Tensor) -> None:
    """Raises ValueError for shapes or strides that the passes cannot read."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or k.stride(2) != k.shape[3] or slots.stride(0) != 1:
        raise ValueError("heads and head_dim of the pool, head_dim of q, and slots must be contiguous")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1] or q.shape[2] % k.shape[2]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit a pool {tuple(k.shape)}")
    if not 1 <= q.shape[1] <= slots.shape[0]:
        raise ValueError(f"a window of {q.shape[1]} queries does not end {slots.shape[0]} tokens")


def window_lse(
    q: Tensor, k: Tensor, slots: Tensor, scale: float, logit_cap: float = 0.0, splits: int | None = None
) -> Tensor:
    """[L, H, G, W] float32: natural log-sum-exp of each window query's logits over the dense tokens that it sees.

    q: [L, W, Hq, D]; its last dimension contiguous. k: [L, slots + 1, H, D], a slice of layers of the pool.
    slots: [n] int64, the dense tokens in order of their positions, the window's own last.
    """
    check_window(q, k, slots)
    layers, window, query_heads, head_dim = q.shape
    heads, n = k.shape[2], slots.shape[0]
    rows = query_heads // heads * window
    blocks = triton.cdiv(rows, BLOCK_M)
    if splits is None:
        wanted = triton.cdiv(WAVES * device_units(q.device), blocks * heads * layers)
        splits = max(1, min(triton.next_power_of_2(wanted), n // (LEAST_BLOCKS * BLOCK_N)))
    lse = torch.empty(splits, layers, heads, query_heads // heads, window, dtype=torch.float32, device=q.device)
    window_lse_kernel[(blocks * splits, heads, layers)](
        q, k, slots, lse, n, window, heads, q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1),
        scale, logit_cap,
        G=query_heads // heads, D=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_D=padded(head_dim),
        SPLITS=splits, HAS_CAP=logit_cap > 0, PRECISION=dot_precision(k), WIDEN=widen_dots(k),
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return lse[0] if splits == 1 else torch.logsumexp(lse, dim=0)


def column_norms(
    q: Tensor,
    k: Tensor,
    slots: Tensor,
    lse: Tensor,
    first: int,
    scale: float,
    logit_cap: float = 0.0,
    mean: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """[L, H, 1, n - first] float32: ``||A[:, t]||_2`` of each token from ``first`` on, mean over the group; [L, H, G,
    n - first] without ``mean``.

    lse: [L, H, G, W] float32 over everything that the queries see, other segments included. Others as ``window_lse``.
    """
    check_window(q, k, slots)
    layers, window, query_heads, head_dim = q.shape
    heads, n = k.shape[2], slots.shape[0]
    group = query_heads // heads
    shape = (layers, heads, 1 if mean else group, n - first)
    out = torch.empty(shape, dtype=torch.float32, device=q.device) if out is None else out
    lse = lse.contiguous()
    column_norms_kernel[(triton.cdiv(n - first, BLOCK_T), heads, layers)](
        q, k, slots, lse, out, n, first, window, heads, lse.stride(0), lse.stride(1), lse.stride(2),
        q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), scale, logit_cap,
        G=group, D=head_dim, BLOCK_T=BLOCK_T, BLOCK_W=BLOCK_W,
        BLOCK_D=padded(head_dim), MEAN=mean, HAS_CAP=logit_cap > 0, PRECISION=dot_precision(k), WIDEN=widen_dots(k),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def pooled_scores(attention: Tensor, norms: Tensor, kernel: int, out: Tensor | None = None) -> Tensor:
    """[L, H, n] float32: attention [L, H, A, n] averaged over ``kernel`` neighbouring tokens (at the ends over those
    that exist), times norms [L, H, A, n], mean over A.

    A is 1 for the rule ``mean_attention`` (both factors are means over the group already), G for ``mean_score``.
    """
    layers, heads, groups, n = attention.shape
    if not (attention.is_contiguous() and norms.is_contiguous() and norms.shape == attention.shape):
        raise ValueError(f"the factors must be contiguous and equal in shape: {attention.shape}, {norms.shape}")
    out = torch.empty(layers, heads, n, dtype=torch.float32, device=attention.device) if out is None else out
    pooled_scores_kernel[(triton.cdiv(n, BLOCK_POOL), layers * heads)](
        attention, norms, out, n, GROUPS=groups, KERNEL=kernel, BLOCK=BLOCK_POOL, num_warps=4
    )
    return out


def window_logits(q: Tensor, k: Tensor, slots: Tensor, scale: float, logit_cap: float = 0.0) -> Tensor:
    """[L, H, G, W, n] float64, -inf where a query does not see a token: what the passes never write."""
    window, query_heads = q.shape[1:3]
    heads, n = k.shape[2], slots.shape[0]
    query = q.to(k.dtype).double().unflatten(2, (heads, query_heads // heads))
    logits = torch.einsum("lwhgd,lnhd->lhgwn", query, k[:, slots].double()) * scale
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    hidden = torch.ones(window, n, dtype=torch.bool, device=q.device).triu(n - window + 1)
    return logits.masked_fill(hidden, float("-inf"))


def window_lse_reference(q, k, slots, scale, logit_cap=0.0):  # type: ignore[no-untyped-def]
    """What window_lse computes, in plain torch."""
    return window_logits(q, k, slots, scale, logit_cap).logsumexp(-1).float()


def column_norms_reference(q, k, slots, lse, first, scale, logit_cap=0.0, mean=True):  # type: ignore[no-untyped-def]
    """What column_norms computes, in plain torch."""
    attention = (window_logits(q, k, slots, scale, logit_cap) - lse.double()[..., None]).exp()[..., first:]
    window, n = q.shape[1], slots.shape[0]
    visible = (n - torch.arange(first, n, device=q.device)).clamp(max=window)
    norms = (attention.square().sum(3) * (window / visible)).sqrt().float()
    return norms.mean(2, keepdim=True) if mean else norms


def pooled_scores_reference(attention, norms, kernel):  # type: ignore[no-untyped-def]
    """What pooled_scores computes, in plain torch."""
    pooled = torch.nn.functional.avg_pool1d(
        attention.flatten(0, 2), kernel, stride=1, padding=kernel // 2, count_include_pad=False
    )
    return (pooled.view(attention.shape) * norms).mean(2)
