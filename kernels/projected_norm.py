"""The value factor of a score: ``||v W_O^i||_2`` of every query head through a D x D factor of W_O's Gram matrix.

``v^T (W_O^i W_O^i^T) v = ||v F||^2`` with F F^T = W_O^i W_O^i^T, so nothing of the hidden size is formed, and a block
of values is read once for its whole group. Source: arXiv 2605.07234, the output projection's factor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dot_precision, padded, widen_dots

BLOCK_T = 128
BLOCK_C = 64


@triton.jit(do_not_specialize=["n"])
def projected_norm_kernel(
    v_ptr, slots_ptr, factors_ptr, out_ptr, n, heads, v_stride_l, v_stride_s,
    G: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    MEAN: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, kv head, layer). factors [L, H, D, G * D], out [L, H, 1 or G, n] float32."""
    h, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    inside = t < n
    slot = tl.load(slots_ptr + t, mask=inside, other=0).to(tl.int64)
    v_at = layer * v_stride_l + slot * v_stride_s + h * D
    v = tl.load(v_ptr + v_at[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    if WIDEN:
        v = v.to(tl.float32)
    of_list = layer * heads + h
    of_list = layer * heads + h
    of_head = factors_ptr + of_list * D * (G * D)
    mean = tl.zeros([BLOCK_T], tl.float32)
    for g in range(G):
        squares = tl.zeros([BLOCK_T], tl.float32)
        for first in range(0, D, BLOCK_C):
            c = first + tl.arange(0, BLOCK_C)
            factor = tl.load(
                of_head + d[:, None] * (G * D) + g * D + c[None, :], mask=(d[:, None] < D) & (c[None, :] < D), other=0.0
            )
            if WIDEN:
                factor = factor.to(tl.float32)
            x = tl.dot(v, factor, input_precision=PRECISION)
            squares += tl.sum(x * x, 1)
        norm = tl.sqrt(squares)
        if MEAN:
            mean += norm
        else:
            tl.store(out_ptr + (of_list * G + g) * n + t, norm, mask=inside)
    if MEAN:
        tl.store(out_ptr + of_list * n + t, mean / G, mask=inside)


def projected_norm(v: Tensor, slots: Tensor, factors: Tensor, mean: bool = True, out: Tensor | None = None) -> Tensor:
    """[L, H, 1, n] float32: ``||v_t F||_2``, mean over the group; [L, H, G, n] without ``mean``.

    v: [L, slots + 1, H, D], a slice of layers of the pool. slots: [n] int64. factors: [L, H, D, G * D] in v's dtype,
    each query head's F side by side, contiguous.
    """
    layers, _, heads, head_dim = v.shape
    if v.stride(-1) != 1 or v.stride(2) != head_dim or slots.stride(0) != 1 or not factors.is_contiguous():
        raise ValueError("heads and head_dim of the pool, slots and factors must be contiguous")
    if factors.shape[:3] != (layers, heads, head_dim) or factors.dtype != v.dtype:
        raise ValueError(f"factors {tuple(factors.shape)} {factors.dtype} do not fit {tuple(v.shape)} {v.dtype}")
    group, n = factors.shape[3] // head_dim, slots.shape[0]
    shape = (layers, heads, 1 if mean else group, n)
    out = torch.empty(shape, dtype=torch.float32, device=v.device) if out is None else out
    projected_norm_kernel[(triton.cdiv(n, BLOCK_T), heads, layers)](
        v, slots, factors, out, n, heads, v.stride(0), v.stride(1),
        G=group, D=head_dim, BLOCK_T=BLOCK_T, BLOCK_C=min(BLOCK_C, padded(head_dim)), BLOCK_D=padded(head_dim),
        MEAN=mean, PRECISION=dot_precision(v), WIDEN=widen_dots(v), num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def projected_norm_reference(v, slots, factors, mean=True):  # type: ignore[no-untyped-def]
    """What projected_norm computes, in plain torch."""
    head_dim = v.shape[3]
    projected = torch.einsum("lnhd,lhde->lhne", v[:, slots].double(), factors.double())
    norms = projected.unflatten(-1, (-1, head_dim)).norm(dim=-1).float().transpose(2, 3)
    return norms.mean(2, keepdim=True) if mean else norms
