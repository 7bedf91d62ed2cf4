"""Packing: the kept rows of a stretch into a segment's slots, and the halves of a segment into slots of their own.

Source and target rows may overlap, so rows pass through scratch memory; a few columns of them at a time, because each
column of a row moves on its own: so the scratch has a bound whatever the number of rows. Row ids are those of
``laprox_sglang.cache.rows``, in its packing order, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
# Scratch for the columns of one move. At 32 bytes a row, the memory's smallest sector, it is not bounded any further.
SCRATCH_BYTES = 256 << 20
LEAST_BYTES = 32


@triton.jit
def list_of(r, indptr_ptr, lists, STEPS: tl.constexpr):
    """[BLOCK] the list that holds entry r, by bisection."""
    low = tl.zeros_like(r)
    high = low + lists - 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        right = tl.load(indptr_ptr + middle + 1, mask=low < high, other=2147483647).to(tl.int32) <= r
        low = tl.where(right, middle + 1, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def packed_row(index, slots_ptr, count, heads, slot_stride, mask):
    """[BLOCK] row number ``index`` of ``count`` slots, in the order (layer, slot, head)."""
    count = tl.maximum(count, 1)
    slot = tl.load(slots_ptr + (index // heads) % count, mask=mask, other=0).to(tl.int64)
    return (((index // (count * heads)).to(tl.int64) * slot_stride + slot) * heads + index % heads).to(tl.int32)


@triton.jit(do_not_specialize=["entries", "count"])
def pack_addresses_kernel(
    positions_ptr, indptr_ptr, slots_ptr, source_ptr, target_ptr, entries, count, lists, heads, slot_stride,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of entries): where each entry lies, and where it goes."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < entries
    which = list_of(r, indptr_ptr, lists, STEPS)
    position = tl.load(positions_ptr + r, mask=mask, other=0)
    slot = tl.load(slots_ptr + position, mask=mask, other=0).to(tl.int64)
    source = ((which // heads).to(tl.int64) * slot_stride + slot) * heads + which % heads
    tl.store(source_ptr + r, source.to(tl.int32), mask=mask)
    tl.store(target_ptr + r, packed_row(r, slots_ptr, count, heads, slot_stride, mask), mask=mask)


@triton.jit(do_not_specialize=["at"])
def count_left_kernel(positions_ptr, indptr_ptr, left_ptr, lists, at, BLOCK: tl.constexpr):
    """left [lists]: entries of each list before token ``at``, by bisection: positions ascend within a list."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < lists
    start = tl.load(indptr_ptr + i, mask=mask, other=0)
    low, high = start, tl.load(indptr_ptr + i + 1, mask=mask, other=0)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        before = tl.load(positions_ptr + middle, mask=low < high, other=2147483647) < at
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, tl.minimum(high, middle))
    tl.store(left_ptr + i, low - start, mask=mask)


@triton.jit(do_not_specialize=["entries", "at", "left_count", "right_count"])
def split_addresses_kernel(
    positions_ptr, indptr_ptr, left_indptr_ptr, slots_ptr, target_ptr,
    left_rows_ptr, left_positions_ptr, right_rows_ptr, right_positions_ptr,
    entries, at, left_count, right_count, lists, heads, slot_stride,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of entries): the half and the row that each entry goes to. The right half's slots follow the
    left half's in ``slots``."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = r < entries
    which = list_of(r, indptr_ptr, lists, STEPS)
    offset = r - tl.load(indptr_ptr + which, mask=mask, other=0).to(tl.int32)
    left_start = tl.load(left_indptr_ptr + which, mask=mask, other=0).to(tl.int32)
    in_left = tl.load(left_indptr_ptr + which + 1, mask=mask, other=0).to(tl.int32) - left_start
    is_left = offset < in_left
    position = tl.load(positions_ptr + r, mask=mask, other=0)
    to_left = left_start + offset
    to_right = r - left_start - in_left
    left_row = packed_row(to_left, slots_ptr, left_count, heads, slot_stride, mask & is_left)
    right_row = packed_row(to_right, slots_ptr + left_count, right_count, heads, slot_stride, mask & ~is_left)
    tl.store(target_ptr + r, tl.where(is_left, left_row, right_row), mask=mask)
    tl.store(left_rows_ptr + to_left, left_row, mask=mask & is_left)
    tl.store(left_positions_ptr + to_left, position, mask=mask & is_left)
    tl.store(right_rows_ptr + to_right, right_row, mask=mask & ~is_left)
    tl.store(right_positions_ptr + to_right, position - at, mask=mask & ~is_left)


@triton.jit(do_not_specialize=["count"])
def copy_columns_kernel(
    from_ptr, to_ptr, index_ptr, count, from_stride, to_stride,
    GATHER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of rows): WIDTH columns of row index[r] to scratch row r with GATHER, else the other way."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    mask = r < count
    row = tl.load(index_ptr + r, mask=mask, other=0).to(tl.int64)
    source, target = (row, r) if GATHER else (r, row)
    values = tl.load(from_ptr + source[:, None] * from_stride + column[None, :], mask=mask[:, None])
    tl.store(to_ptr + target[:, None] * to_stride + column[None, :], values, mask=mask[:, None])


def column_width(count: int, head_dim: int, item_bytes: int) -> int:
    """Columns that are moved at a time: a power of 2 that divides head_dim, as many as the scratch holds."""
    width = head_dim & -head_dim
    while width * item_bytes > LEAST_BYTES and count * width * item_bytes > SCRATCH_BYTES:
        width //= 2
    return width


def move_rows(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copy rows ``source`` to rows ``target`` (both [R] int32) of each pool [rows, D]; the two sets may overlap.

    Targets must differ from each other.
    """
    if source.shape[0] > 0:
        _copy(pools, source, target, column_width(source.shape[0], pools[0].shape[1], pools[0].element_size()))


def _copy(pools: tuple[Tensor, ...], source: Tensor, target: Tensor, width: int) -> None:
    count = source.shape[0]
    for rows in pools:
        scratch = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
        block = max(1, 4096 // width)
        grid = (triton.cdiv(count, block),)
        for first in range(0, rows.shape[1], width):
            columns, stride = rows[:, first : first + width], rows.stride(0)
            constants = dict(WIDTH=width, BLOCK=block, num_warps=4)
            copy_columns_kernel[grid](columns, scratch, source, count, stride, width, GATHER=True, **constants)
            copy_columns_kernel[grid](scratch, columns, target, count, width, stride, GATHER=False, **constants)


def pack_rows(k: Tensor, v: Tensor, stretch_slots: Tensor, positions: Tensor, indptr: Tensor, count: int) -> Tensor:
    """Pack the kept entries of a dense stretch into its own first ``count`` slots; returns their row ids [R] int32.

    k, v: [L, slots + 1, H, D] contiguous. stretch_slots: [n] int64. positions: [R] int32, ordered by (layer, head,
    position). indptr: [L * H + 1] int32 or int64. count: at least R / (L * H).
    """
    layers, slot_stride, heads, head_dim = k.shape
    entries, lists = positions.shape[0], layers * heads
    if entries > count * lists:
        raise ValueError(f"{entries} entries do not fit {count} slots of {lists} rows")
    source = torch.empty(entries, dtype=torch.int32, device=k.device)
    target = torch.empty_like(source)
    if entries == 0:
        return target
    pack_addresses_kernel[(triton.cdiv(entries, BLOCK),)](
        positions, indptr, stretch_slots, source, target, entries, count, lists, heads, slot_stride,
        STEPS=lists.bit_length() + 1, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    move_rows((k.view(-1, head_dim), v.view(-1, head_dim)), source, target)
    return target


def split_rows(
    k: Tensor,
    v: Tensor,
    row_ids: Tensor,
    positions: Tensor,
    indptr: Tensor,
    at: int,
    left_entries: int,
    slots: Tensor,
    counts: tuple[int, int],
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Divide a segment at token ``at`` and re-pack both halves: (row_ids, positions, indptr) of the left and the right.

    left_entries: entries before ``at``, known on the host. slots: int64, the left half's ``counts[0]`` slots and then
    the right half's ``counts[1]``. The right half's positions count from ``at``. indptr: [L * H + 1] int64.
    """
    layers, slot_stride, heads, head_dim = k.shape
    entries, lists = row_ids.shape[0], layers * heads
    left_indptr = torch.zeros_like(indptr)
    count_left_kernel[(triton.cdiv(lists, BLOCK),)](
        positions, indptr, left_indptr[1:], lists, at, BLOCK=BLOCK, num_warps=4
    )
    left_indptr = left_indptr.cumsum(0)
    sizes = (left_entries, left_entries, entries - left_entries, entries - left_entries)
    left_rows, left_positions, right_rows, right_positions = (
        torch.empty(size, dtype=torch.int32, device=k.device) for size in sizes
    )
    target = torch.empty_like(row_ids)
    if entries:
        split_addresses_kernel[(triton.cdiv(entries, BLOCK),)](
            positions, indptr, left_indptr, slots, target, left_rows, left_positions, right_rows, right_positions,
            entries, at, *counts, lists, heads, slot_stride,
            STEPS=lists.bit_length() + 1, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    # One move for both: a half's target may be a row that the other half still has to read.
    move_rows((k.view(-1, head_dim), v.view(-1, head_dim)), row_ids, target)
    return (left_rows, left_positions, left_indptr), (right_rows, right_positions, indptr - left_indptr)


def warm_up(k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, indptr: Tensor) -> None:
    """Compile what packing and splitting run. slots: [1], the padding slot, which may be written; positions: all 0."""
    row_ids = pack_rows(k, v, slots, torch.zeros_like(positions), indptr, slots.shape[0])
    split_rows(k, v, row_ids, torch.zeros_like(positions), indptr.long(), 1, len(row_ids), slots, (len(slots), 0))
    rows = k.view(-1, k.shape[3])
    width = column_width(1, rows.shape[1], rows.element_size())
    while width * rows.element_size() >= LEAST_BYTES:
        _copy((rows,), row_ids[:1], row_ids[:1], width)
        width //= 2


def packed_rows_reference(slots, entries, layers, heads, slot_stride):  # type: ignore[no-untyped-def]
    """[entries] int32: the first rows of ``slots``, by (layer, slot, head)."""
    layer = torch.arange(layers, device=slots.device)[:, None, None] * slot_stride
    rows = (layer + slots[:, None]) * heads + torch.arange(heads, device=slots.device)
    return rows.flatten()[:entries].to(torch.int32)


def pack_rows_reference(k, v, stretch_slots, positions, indptr, count):  # type: ignore[no-untyped-def]
    """What pack_rows computes, in plain torch."""
    layers, slot_stride, heads, head_dim = k.shape
    which = torch.repeat_interleave(torch.arange(layers * heads, device=k.device), indptr.long().diff())
    source = (which // heads * slot_stride + stretch_slots[positions.long()]) * heads + which % heads
    target = packed_rows_reference(stretch_slots[:count], positions.shape[0], layers, heads, slot_stride)
    for rows in (k.view(-1, head_dim), v.view(-1, head_dim)):
        rows[target.long()] = rows[source]
    return target


def split_rows_reference(k, v, row_ids, positions, indptr, at, left_entries, slots, counts):  # type: ignore[no-untyped-def]
    """What split_rows computes, in plain torch."""
    layers, slot_stride, heads, head_dim = k.shape
    which = torch.repeat_interleave(torch.arange(layers * heads, device=k.device), indptr.diff())
    halves, kept = [], [row.view(-1, head_dim)[row_ids.long()] for row in (k, v)]
    for chosen, start, own in ((positions < at, 0, slots[: counts[0]]), (positions >= at, at, slots[counts[0] :])):
        rows = packed_rows_reference(own, int(chosen.sum()), layers, heads, slot_stride)
        ends = torch.bincount(which[chosen], minlength=layers * heads).cumsum(0)
        for pool, values in zip((k, v), kept, strict=True):
            pool.view(-1, head_dim)[rows.long()] = values[chosen]
        halves.append((rows, positions[chosen] - start, torch.cat([ends.new_zeros(1), ends])))
    return tuple(halves)
