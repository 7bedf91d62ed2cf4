"""Row ids and offsets of all lists of a batch, joined from the parts of the requests' paths in one launch.

A part is a compressed segment (row ids in CSR order over the L * H lists) or a run of dense tokens (their slots, the
same for every list). Offsets need no scan over lists: a list begins where the offsets of all parts before it add up
to, since each part has offsets of its own already. So nothing has to be known on the host but the parts' sizes.

During decode nothing is rebuilt: the tokens behind the last compressed one are read from SGLang's own table. For
FlashInfer, whose lists must hold every token, a part of slots of that table ends the path and the launch is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
# Programs that share the copy of one list's part: lists are of very unequal length.
LANES = 4
PARTS = 16
FIELDS = 9


@dataclass(frozen=True)
class Part:
    """values: [R] int32 row ids where ``indptr`` [L * H + 1] int64 is given, else [tokens] int64 or int32 slots."""

    values: Tensor
    indptr: Tensor | None = None

    def rows(self, lists: int) -> int:
        """How many rows the part adds to a request's lists, all in all."""
        return self.values.shape[0] * (1 if self.indptr is not None else lists)


@triton.jit
def offsets_of(parts_ptr, part, list_index, mask, FIELDS: tl.constexpr):
    """[PARTS] int64: where list ``list_index`` (a number, or one for each part) begins within each part."""
    address = tl.load(parts_ptr + part * FIELDS + 1, mask=mask, other=0)
    tokens = tl.load(parts_ptr + part * FIELDS + 2, mask=mask, other=0)
    ragged = mask & (address != 0)
    loaded = tl.load(address.to(tl.pointer_type(tl.int64)) + list_index, mask=ragged, other=0)
    return tl.where(ragged, loaded, list_index.to(tl.int64) * tokens)


@triton.jit(do_not_specialize=["requests"])
def page_table_kernel(
    parts_ptr, rows_ptr, indptr_ptr, requests, lists, heads, slot_stride,
    LAYER_MAJOR: tl.constexpr, PARTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Program (list, part, lane). A part's fields: address of values, address of offsets or 0, tokens, bytes of a slot,
    request, first and end part to add up, rows of the requests before, the request's first part."""
    i, part, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    mine = parts_ptr + part * FIELDS
    request = tl.load(mine + 4)
    first_part, end_part = tl.load(mine + 5).to(tl.int32), tl.load(mine + 6).to(tl.int32)
    layer = i // heads
    start = tl.load(mine + 7)
    is_first = part == tl.load(mine + 8)
    for first in range(first_part, end_part, PARTS):
        other = first + tl.arange(0, PARTS)
        mask = other < end_part
        at = tl.where(other < part, i + 1, i)
        if LAYER_MAJOR:
            # Before this list: all lists of the layers before, and this layer's lists of the requests before.
            of_request = tl.load(parts_ptr + other * FIELDS + 4, mask=mask, other=0)
            at = tl.where(of_request < request, (layer + 1) * heads, tl.where(of_request > request, layer * heads, at))
        start += tl.sum(tl.where(mask, offsets_of(parts_ptr, other, at, mask, FIELDS), 0), 0)
    one = part + tl.arange(0, 1)
    low = tl.sum(offsets_of(parts_ptr, one, one * 0 + i, one >= 0, FIELDS), 0)
    high = tl.sum(offsets_of(parts_ptr, one, one * 0 + i + 1, one >= 0, FIELDS), 0)
    count = (high - low).to(tl.int32)

    values = tl.load(mine)
    is_segment = tl.load(mine + 1) != 0
    wide = tl.load(mine + 3) == 8
    for first in range(lane * BLOCK, count, LANES * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < count
        row = tl.load(values.to(tl.pointer_type(tl.int32)) + low + j, mask=inside & is_segment, other=0)
        slot = tl.load(values.to(tl.pointer_type(tl.int64)) + j, mask=inside & ~is_segment & wide, other=0)
        slot += tl.load(values.to(tl.pointer_type(tl.int32)) + j, mask=inside & ~is_segment & ~wide, other=0)
        dense = ((layer.to(tl.int64) * slot_stride + slot) * heads + i % heads).to(tl.int32)
        tl.store(rows_ptr + start + j, tl.where(is_segment, row, dense), mask=inside)

    if LAYER_MAJOR:
        at_indptr = layer.to(tl.int64) * (requests * heads + 1) + request * heads + i % heads
        last = (request == requests - 1) & (i % heads == heads - 1)
    else:
        at_indptr = request * (lists + 1) + i
        last = i == lists - 1
    writes = is_first & (lane == 0)
    tl.store(indptr_ptr + at_indptr, start, mask=writes)
    # What ends the row of offsets: where the last list would go on.
    if last & (lane == 0) & (part == tl.num_programs(1) - 1 if LAYER_MAJOR else part == end_part - 1):
        tl.store(indptr_ptr + at_indptr + 1, start + count)


def page_table(
    requests: Sequence[Sequence[Part]],
    layers: int,
    heads: int,
    slot_stride: int,
    device: torch.device,
    layer_major: bool = False,
    rows: Tensor | None = None,
    indptr: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(rows [N] int32, indptr int64) of a batch; each request is its path's parts in order, maybe none.

    indptr is [B, L * H + 1] and rows are by (request, layer, head); with ``layer_major`` [L, B * H + 1] and by (layer,
    request, head): every layer's row of offsets is then FlashInfer's ``kv_indptr`` with ``kv_indices = rows``, one
    page of one token each. slot_stride: slots of a layer, padding included. ``rows`` (at least N) and ``indptr`` given,
    they are filled (for a CUDA graph's static buffers). The tensors of the parts must live until the launch is queued.
    """
    lists = layers * heads
    empty = Part(torch.empty(0, dtype=torch.int64, device=device))
    fields: list[list[int]] = []
    total = 0
    count = sum(max(1, len(parts)) for parts in requests)
    for number, parts in enumerate(requests):
        begin = len(fields)
        used = list(parts) or [empty]
        for part in used:
            address = 0 if part.indptr is None else part.indptr.data_ptr()
            span = (0, count) if layer_major else (begin, begin + len(used))
            tokens = part.values.shape[0] if part.indptr is None else 0
            base = 0 if layer_major else total
            item = part.values.element_size()
            fields.append([part.values.data_ptr(), address, tokens, item, number, *span, base, begin])
        total += sum(part.rows(lists) for part in parts)
    width = len(requests) * heads + 1 if layer_major else lists + 1
    height = layers if layer_major else len(requests)
    rows = torch.empty(total, dtype=torch.int32, device=device) if rows is None else rows
    indptr = torch.empty(height, width, dtype=torch.int64, device=device) if indptr is None else indptr
    if not fields:
        return rows, indptr.zero_()
    if rows.shape[0] < total or indptr.shape != (height, width) or not indptr.is_contiguous():
        raise ValueError(f"{total} rows and offsets {(height, width)} do not fit {rows.shape} and {indptr.shape}")
    table = torch.tensor(fields, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    page_table_kernel[(lists, count, LANES)](
        table, rows, indptr, len(requests), lists, heads, slot_stride,
        LAYER_MAJOR=layer_major, PARTS=PARTS, LANES=LANES, BLOCK=BLOCK, FIELDS=FIELDS, num_warps=4,
    )  # fmt: skip
    return rows, indptr


def page_table_reference(requests, layers, heads, slot_stride, device, layer_major=False):  # type: ignore[no-untyped-def]
    """What page_table computes, in plain torch."""

    def rows_of(part, i):  # type: ignore[no-untyped-def]
        if part.indptr is not None:
            return part.values[part.indptr[i] : part.indptr[i + 1]]
        return ((i // heads * slot_stride + part.values.long()) * heads + i % heads).to(torch.int32)

    joined = [
        [torch.cat([rows_of(part, i) for part in parts] + [torch.empty(0, dtype=torch.int32, device=device)])
         for i in range(layers * heads)]
        for parts in requests
    ]  # fmt: skip
    if layer_major:
        order = [[lists[layer * heads + h] for lists in joined for h in range(heads)] for layer in range(layers)]
    else:
        order = joined
    lengths = torch.tensor([[len(each) for each in row] for row in order]).to(device)
    ends = lengths.flatten().cumsum(0).view(lengths.shape)
    indptr = torch.cat([(ends - lengths)[:, :1], ends], dim=1)
    return torch.cat([each for row in order for each in row]), indptr
