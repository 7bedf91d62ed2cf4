"""Which piece of which list each program of a decode step walks over, worked out on the device for all layers at once.

The lists of a layer are cut into pieces of about equal length, ``total / programs`` entries each: so a head that keeps
many times more than the others only gets more pieces, and the step does not wait for it. The number of pieces differs
from layer to layer and step to step, the number of programs does not: it follows from shapes alone, which a CUDA graph
needs. Programs without a piece return at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import device_units, padded

# Head dims' worth of decode programs that a multiprocessor holds at a time: 6 of D 64, 3 of D 128 (read from the
# compiled kernels, see tests/kernels/compile_all.py).
RESIDENT_WIDTH = 384
# A piece shorter than this spends more on its partial result than it gains.
LEAST_PIECE = 256
# Of a piece: its list (-1: none), its first entry, the entry after its last, and one number unused.
FIELDS = 4


@dataclass(frozen=True)
class DecodePlan:
    """Made by ``plan_decode``; read by ``ragged_decode``.

    pieces: [L, P, 4] int32 for P programs. first: [L, B * H + 1] int32, the first piece of each list; a list's pieces
    are adjacent.
    """

    pieces: Tensor
    first: Tensor

    @property
    def programs(self) -> int:
        return self.pieces.shape[1]

    @classmethod
    def empty(cls, layers: int, lists: int, device: torch.device, wanted: int) -> DecodePlan:
        """Room for a plan of B * H = ``lists`` lists per layer, cut into ``wanted`` pieces (see ``pieces_for``).

        P is ``wanted + lists``: each list may have one piece that is not full.
        """
        return cls(
            torch.empty(layers, wanted + lists, FIELDS, dtype=torch.int32, device=device),
            torch.empty(layers, lists + 1, dtype=torch.int32, device=device),
        )


def pieces_for(lists: int, head_dim: int, device: torch.device) -> int:
    """How many pieces a layer's lists should make: as many as run at a time, so that all start and end together.

    Each list may add one. Where the lists alone are so many that there must be several rounds, pieces are half as long,
    so that the last round is short.
    """
    at_a_time = max(2, RESIDENT_WIDTH // padded(head_dim)) * device_units(device)
    return at_a_time - lists if lists <= at_a_time // 2 else 2 * at_a_time


@triton.jit(do_not_specialize=["count", "programs", "wanted"])
def plan_kernel(
    indptr_ptr, tail_start_ptr, seq_len_ptr, pieces_ptr, first_ptr, count, heads, lists, programs, wanted,
    LISTS: tl.constexpr, LEAST: tl.constexpr, BLOCK_N: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (layer). The list of request b and kv head h is number b * heads + h of ``count``."""
    layer = tl.program_id(0)
    i = tl.arange(0, LISTS)
    mask = i < count
    b = (i // heads).to(tl.int64)
    list_at = indptr_ptr + b * (lists + 1) + layer * heads + i % heads
    listed = tl.load(list_at + 1, mask=mask, other=0) - tl.load(list_at, mask=mask, other=0)
    tail = tl.load(seq_len_ptr + b, mask=mask, other=0) - tl.load(tail_start_ptr + b, mask=mask, other=0)
    n = listed + tail
    piece = tl.maximum(tl.cdiv(tl.sum(n, 0), wanted), LEAST)
    piece = tl.cdiv(piece, BLOCK_N) * BLOCK_N
    number = tl.cdiv(n, piece).to(tl.int32)
    # Pieces of a list are of equal length, so that none of them is a short rest.
    span = (tl.cdiv(tl.cdiv(n, tl.maximum(number, 1)), BLOCK_N) * BLOCK_N).to(tl.int32)
    n = n.to(tl.int32)
    end = tl.cumsum(number, 0)
    first = end - number
    of_layer = first_ptr + layer * (count + 1)
    tl.store(of_layer + i, first, mask=mask)
    total = tl.sum(number, 0)
    tl.store(of_layer + count, total)
    of_layer = pieces_ptr + layer.to(tl.int64) * programs * FIELDS
    for j in range(tl.max(number, 0)):
        at = of_layer + (first + j) * FIELDS
        has = j < number
        tl.store(at, i, mask=has)
        tl.store(at + 1, j * span, mask=has)
        tl.store(at + 2, tl.minimum(j * span + span, n), mask=has)
    for rest in range(total, programs, LISTS):
        tl.store(of_layer + (rest + i) * FIELDS, -1, mask=rest + i < programs)


def plan_decode(
    indptr: Tensor,
    tail_start: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    block_n: int,
    plan: DecodePlan,
) -> DecodePlan:
    """Fill ``plan`` for one decode step of B requests, all layers; the others as in
    ``laprox_sglang.attention.base.RaggedBatch``. Pieces start at multiples of ``block_n``. Allocates nothing.
    """
    requests, lists = indptr.shape[0], indptr.shape[1] - 1
    count, layers = requests * num_kv_heads, lists // num_kv_heads
    wanted = plan.programs - count
    if wanted < 1 or plan.pieces.shape[0] != layers or plan.first.shape != (layers, count + 1):
        raise ValueError(f"a plan of {tuple(plan.first.shape)} lists does not fit {layers} layers of {count} lists")
    size = triton.next_power_of_2(count)
    plan_kernel[(layers,)](
        indptr, tail_start, seq_len, plan.pieces, plan.first, count, num_kv_heads, lists, plan.programs, wanted,
        LISTS=size, LEAST=LEAST_PIECE, BLOCK_N=block_n, FIELDS=FIELDS, num_warps=4 if size <= 1024 else 16,
    )  # fmt: skip
    return plan


def plan_decode_reference(indptr, tail_start, seq_len, num_kv_heads, block_n, wanted):  # type: ignore[no-untyped-def]
    """What plan_decode computes, in plain Python: (pieces, first) as lists; pieces without a list are left out."""
    pieces, first = [], []
    tails = (seq_len - tail_start)[:, None]
    for of_layer in (indptr.diff(dim=1) + tails).split(num_kv_heads, dim=1):
        lengths = of_layer.flatten().tolist()
        piece = triton.cdiv(max(triton.cdiv(sum(lengths), wanted), LEAST_PIECE), block_n) * block_n
        mine, starts = [], [0]
        for i, n in enumerate(lengths):
            number = triton.cdiv(n, piece)
            span = triton.cdiv(triton.cdiv(n, max(number, 1)), block_n) * block_n
            mine += [(i, j * span, min(j * span + span, n)) for j in range(number)]
            starts.append(len(mine))
        pieces.append(mine)
        first.append(starts)
    return pieces, first
