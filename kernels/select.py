"""Exact model-wide top-k of scores [L, H, n], as lists of positions in CSR order, without sorting and without waiting.

Every entry has a key of 63 bits that no other has: its score, and below it its place in (position, layer, head) order,
so that of equal scores the earlier position is the larger key. A radix select finds the k-th largest key 8 bits at a
time: each pass counts the digits of the entries that agree with the digits found so far. It ends as soon as the
entries that agree are exactly as many as are missing, which without ties is when their scores differ: later passes
then only read 256 counts. Same set as ``laprox_sglang.policy`` (allocations ``model`` and ``model_raw``), bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PASSES = 8
BINS = 256
BLOCK = 1024
# Tokens that a program of a counting pass walks over, so that few programs add to the same 256 counts.
SPAN = 8192


@triton.jit
def entry_keys(scores_ptr, protected_ptr, at, t, inside, list_index, lists):
    """[BLOCK] int64 keys in [0, 2^63) of entries t of one list; -1 where not ``inside``."""
    score = tl.load(scores_ptr + at, mask=inside, other=0.0)
    score = tl.where((score != score) | (score == 0.0), 0.0, score)  # NaN and -0 are 0
    score = tl.minimum(tl.maximum(score, -3.4028234663852886e38), 3.4028234663852886e38)
    first = tl.load(protected_ptr + t, mask=inside, other=0) != 0
    score = tl.where(first, float("inf"), score)
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    place = t.to(tl.int64) * lists + list_index
    return tl.where(inside, (ordered << 31) | (2147483647 - place), -1)


@triton.jit
def narrow(counts_ptr, k, DONE: tl.constexpr, BINS: tl.constexpr):
    """What the first DONE passes have found: (digits of the k-th key, whether all entries that agree with them are
    needed: then there is nothing left to find)."""
    bins = tl.arange(0, BINS)
    prefix = tl.zeros([], tl.int64)
    missing = tl.zeros([], tl.int32) + k
    exact = missing < 0
    for step in tl.static_range(DONE):
        count = tl.load(counts_ptr + step * BINS + bins)
        at_least = tl.cumsum(count, 0, reverse=True)  # descending over the bins
        digit = tl.sum((at_least >= missing).to(tl.int32), 0) - 1
        mine = tl.sum(tl.where(bins == digit, count, 0), 0)
        above = tl.sum(tl.where(bins == digit, at_least, 0), 0) - mine
        # After an exact pass the counts are zero; the digits that follow are zeros: everything that agrees is taken.
        prefix = (prefix << 8) | tl.where(exact, 0, digit).to(tl.int64)
        missing = tl.where(exact, missing, missing - above)
        exact = exact | (missing == mine)
    return prefix, exact


@triton.jit(do_not_specialize=["n", "k", "stride_l", "stride_h"])
def count_digits_kernel(
    scores_ptr, protected_ptr, counts_ptr, n, heads, lists, k, stride_l, stride_h,
    DONE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (span of tokens, list): add to counts[DONE] how often each next digit occurs."""
    list_index = tl.program_id(1)
    prefix, exact = narrow(counts_ptr, k, DONE, BINS)
    if not exact:
        row = (list_index // heads).to(tl.int64) * stride_l + (list_index % heads) * stride_h
        shift: tl.constexpr = 56 - 8 * DONE
        found = tl.zeros([BINS], tl.int32)
        low = tl.program_id(0) * SPAN
        for first in range(low, tl.minimum(low + SPAN, n), BLOCK):
            t = first + tl.arange(0, BLOCK)
            key = entry_keys(scores_ptr, protected_ptr, row + t, t, t < n, list_index, lists)
            agrees = t < n
            if DONE > 0:
                agrees = agrees & ((key >> (shift + 8)) == prefix)
            found += tl.histogram(((key >> shift) & 255).to(tl.int32), BINS, mask=agrees)
        tl.atomic_add(counts_ptr + DONE * BINS + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def kept_entries(
    scores_ptr, protected_ptr, counts_ptr, n, heads, lists, k, stride_l, stride_h,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """(t [BLOCK], kept [BLOCK] bool) of this program's block of tokens (axis 0) and list (axis 1)."""
    list_index = tl.program_id(1)
    threshold, _ = narrow(counts_ptr, k, PASSES, BINS)
    row = (list_index // heads).to(tl.int64) * stride_l + (list_index % heads) * stride_h
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = entry_keys(scores_ptr, protected_ptr, row + t, t, t < n, list_index, lists)
    return t, key >= threshold


@triton.jit(do_not_specialize=["n", "k", "stride_l", "stride_h"])
def count_kept_kernel(
    scores_ptr, protected_ptr, counts_ptr, kept_ptr, n, heads, lists, k, stride_l, stride_h,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, list): kept [lists, blocks] int32."""
    _, kept = kept_entries(
        scores_ptr, protected_ptr, counts_ptr, n, heads, lists, k, stride_l, stride_h, PASSES, BLOCK, BINS
    )
    at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(kept_ptr + at, tl.sum(kept.to(tl.int32), 0))


@triton.jit(do_not_specialize=["n", "k", "stride_l", "stride_h"])
def write_kept_kernel(
    scores_ptr, protected_ptr, counts_ptr, kept_ptr, ends_ptr, positions_ptr, indptr_ptr,
    n, heads, lists, k, stride_l, stride_h,
    PASSES: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, list): write the block's positions where the blocks before it end."""
    t, kept = kept_entries(
        scores_ptr, protected_ptr, counts_ptr, n, heads, lists, k, stride_l, stride_h, PASSES, BLOCK, BINS
    )
    block, list_index = tl.program_id(0), tl.program_id(1)
    at = list_index * tl.num_programs(0) + block
    end = tl.load(ends_ptr + at)
    start = end - tl.load(kept_ptr + at)
    rank = start + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(positions_ptr + rank, t, mask=kept)
    if block == 0:
        tl.store(indptr_ptr + list_index, start)
    if block == tl.num_programs(0) - 1:
        tl.store(indptr_ptr + list_index + 1, end, mask=list_index == lists - 1)


def select(scores: Tensor, total: int, protected: Tensor) -> tuple[Tensor, Tensor]:
    """(positions [R] int32, indptr [L * H + 1] int32) of the R = min(total, L * H * n) best entries.

    scores: [L, H, n] float32, the last dimension contiguous (a slice of a longer one will do); NaN counts as 0, an
    infinity as the largest number. protected: [n] bool, positions that every list keeps before anything else, in the
    order of their positions where the total does not reach. Of equal scores the earlier position is kept, then the
    lower layer, then the lower head. Positions are in the order (layer, head, position). Raises ValueError for a
    negative total, strides that do not fit and more than 2^31 - 1 scores.
    """
    layers, heads, n = scores.shape
    lists = layers * heads
    if total < 0 or scores.stride(2) != 1 or scores.dtype != torch.float32 or protected.shape != (n,):
        raise ValueError(
            f"cannot keep {total} of float32 scores {tuple(scores.shape)} ({scores.dtype}, strides {scores.stride()}) "
            f"with protected {tuple(protected.shape)}"
        )
    if lists * n >= 2**31:
        raise ValueError(f"{lists * n} scores are more than 2^31 - 1: compress in shorter stretches")
    total = min(total, lists * n)
    device = scores.device
    positions = torch.empty(total, dtype=torch.int32, device=device)
    if total == 0:
        return positions, torch.zeros(lists + 1, dtype=torch.int32, device=device)
    protected = protected.contiguous()
    counts = torch.zeros(PASSES, BINS, dtype=torch.int32, device=device)
    sizes = (n, heads, lists, total, scores.stride(0), scores.stride(1))
    for done in range(PASSES):
        count_digits_kernel[(triton.cdiv(n, SPAN), lists)](
            scores, protected, counts, *sizes, DONE=done, SPAN=SPAN, BLOCK=BLOCK, BINS=BINS, num_warps=4
        )
    blocks = triton.cdiv(n, BLOCK)
    kept = torch.empty(lists * blocks, dtype=torch.int32, device=device)
    constants = dict(PASSES=PASSES, BLOCK=BLOCK, BINS=BINS, num_warps=4)
    count_kept_kernel[(blocks, lists)](scores, protected, counts, kept, *sizes, **constants)
    ends = kept.cumsum(0, dtype=torch.int32)
    indptr = torch.empty(lists + 1, dtype=torch.int32, device=device)
    write_kept_kernel[(blocks, lists)](scores, protected, counts, kept, ends, positions, indptr, *sizes, **constants)
    return positions, indptr


def select_reference(scores, total, protected):  # type: ignore[no-untyped-def]
    """What select computes, by a full sort in plain torch."""
    layers, heads, n = scores.shape
    limit = torch.finfo(torch.float32).max
    ranked = scores.nan_to_num(nan=0.0).clamp(-limit, limit).masked_fill(protected, float("inf"))
    order = ranked.permute(2, 0, 1).flatten().sort(descending=True, stable=True).indices[:total]
    mask = torch.zeros(n * layers * heads, dtype=torch.bool, device=scores.device)
    mask[order] = True
    kept = mask.view(n, layers * heads).T.nonzero()
    indptr = torch.zeros(layers * heads + 1, dtype=torch.int32, device=scores.device)
    indptr[1:] = torch.bincount(kept[:, 0], minlength=layers * heads).cumsum(0)
    return kept[:, 1].to(torch.int32), indptr
