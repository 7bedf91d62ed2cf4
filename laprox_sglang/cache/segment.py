"""A segment: the kept entries of one compressed stretch of tokens, packed into the rows of its slots.

Ownership: a segment owns exactly ``slots``. ``pack`` takes over the stretch's own slots and names those that become
free; ``split`` divides a segment's slots between the two halves, with at most one more slot given by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from laprox_sglang.cache import rows as row_views
from laprox_sglang.cache.rows import RowPool


class Before:
    """``[tokens + 1]`` on the host: how many of a segment's entries lie before each token.

    On a GPU it is copied in the background when the segment is made, so that a split, which needs the number, finds it
    there: the allocator must know how many slots each half takes.
    """

    def __init__(self, positions: Tensor, tokens: int):
        counts = torch.zeros(tokens + 1, dtype=torch.int64, device=positions.device)
        index = positions.long() + 1
        counts = counts.scatter_add_(0, index, torch.ones_like(index)).cumsum(0)
        on_cuda = counts.device.type == "cuda"
        self._copy = torch.empty(tokens + 1, dtype=torch.int64, pin_memory=on_cuda)
        self._copy.copy_(counts, non_blocking=True)
        self._done = torch.cuda.Event() if on_cuda else None
        if self._done is not None:
            self._done.record()

    @property
    def numbers(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        return self._copy.numpy()


@dataclass(frozen=True)
class Segment:
    """Kept entries in the order (layer, head, token position); R entries over L * H lists.

    Attributes:
        tokens: length of the stretch.
        slots: ``[ceil(R / (L * H))]`` int64, device.
        row_ids: ``[R]`` int32, device: where each entry is stored.
        indptr: ``[L * H + 1]`` int64, device.
        positions: ``[R]`` int32, device: token index within the stretch.
        before: on a GPU, the entries before each token (see ``Before``; of a split segment the bare numbers).
        entries: R, known on the host.
    """

    tokens: int
    slots: Tensor
    row_ids: Tensor
    indptr: Tensor
    positions: Tensor
    before: Before | np.ndarray | None = None
    _host: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def entries(self) -> int:
        return self.row_ids.shape[0]

    def entries_before(self, at: int) -> int:
        """Entries of the tokens before ``at``."""
        if self.before is None:
            return int(np.count_nonzero(self.host_positions < at))
        return int(self._numbers_before()[at])

    def _numbers_before(self) -> np.ndarray:
        assert self.before is not None
        return self.before.numbers if isinstance(self.before, Before) else self.before

    @property
    def host_indptr(self) -> np.ndarray:
        return self._host_copy("indptr", self.indptr)

    @property
    def host_positions(self) -> np.ndarray:
        return self._host_copy("positions", self.positions)

    def _host_copy(self, name: str, tensor: Tensor) -> np.ndarray:
        # Read by splits and statistics only, long after the launch that made the tensor: never in the hot path.
        if name not in self._host:
            self._host[name] = tensor.cpu().numpy()
        return self._host[name]


def pack(pool: RowPool, stretch_slots: Tensor, positions: Tensor, indptr: Tensor) -> tuple[Segment, Tensor]:
    """Keep the selected entries of a dense stretch and give up the rest.

    The segment is packed into the stretch's own first slots, so compression never allocates.

    Args:
        stretch_slots: ``[n]`` int64 slots of the dense tokens.
        positions: ``[R]`` int32, token index of each kept entry, ordered by (layer, head, position).
        indptr: ``[L * H + 1]``.
    Returns: the segment and the slots that are now free, ``[n - ceil(R / (L * H))]``.
    """
    entries = positions.shape[0]
    count = pool.slots_for(entries)
    slots, freed = stretch_slots[:count].clone(), stretch_slots[count:].clone()
    if row_views.on_gpu(pool.device):
        return _pack_by_kernel(pool, stretch_slots, positions, indptr, slots), freed
    indptr = indptr.long()
    lists = torch.repeat_interleave(
        torch.arange(pool.rows_per_slot, device=indptr.device), indptr.diff(), output_size=entries
    )
    target = pool.packed_rows(slots, entries)
    pool.move(pool.own_rows(lists, stretch_slots[positions.long()]), target)
    segment = Segment(
        tokens=stretch_slots.shape[0], slots=slots, row_ids=target, indptr=indptr, positions=positions.to(torch.int32)
    )
    return segment, freed


def _pack_by_kernel(pool: RowPool, stretch_slots: Tensor, positions: Tensor, indptr: Tensor, slots: Tensor) -> Segment:
    from laprox_sglang.kernels.pack_rows import pack_rows

    tokens = stretch_slots.shape[0]
    return Segment(
        tokens=tokens,
        slots=slots,
        row_ids=pack_rows(pool.k, pool.v, stretch_slots, positions, indptr, slots.shape[0]),
        indptr=indptr.long(),
        positions=positions.to(torch.int32),
        before=Before(positions, tokens),
    )


def split_needs(pool: RowPool, segment: Segment, at: int) -> int:
    """Slots (0 or 1) that ``split`` needs besides the segment's own."""
    left = segment.entries_before(at)
    needed = pool.slots_for(left) + pool.slots_for(segment.entries - left)
    return max(0, needed - segment.slots.shape[0])


def split(pool: RowPool, segment: Segment, at: int, extra: Tensor | None) -> tuple[Segment, Segment, Tensor]:
    """Divide a segment at token ``at``: exactly the entries before it, and from it on, each in slots of its own.

    Args:
        at: ``0 < at < segment.tokens``.
        extra: one more slot ``[1]`` where ``split_needs`` says so; the segments own it afterwards.
    Returns: left, right (its positions count from ``at``), and the slots that neither needs.
    """
    slots = segment.slots if extra is None else torch.cat([segment.slots, extra.to(segment.slots)])
    if row_views.on_gpu(pool.device):
        return _split_by_kernel(pool, segment, at, slots)
    is_left = segment.host_positions < at
    lists = np.repeat(np.arange(pool.rows_per_slot), np.diff(segment.host_indptr))
    halves, sources, used = [], [], 0
    for chosen, start, tokens in ((is_left, 0, at), (~is_left, at, segment.tokens - at)):
        index = torch.from_numpy(np.flatnonzero(chosen)).to(segment.row_ids.device)
        entries = index.shape[0]
        count = pool.slots_for(entries)
        counts = np.bincount(lists[chosen], minlength=pool.rows_per_slot)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).to(segment.indptr)
        own = slots[used : used + count].clone()
        used += count
        sources.append(segment.row_ids[index])
        halves.append(
            Segment(
                tokens=tokens,
                slots=own,
                row_ids=pool.packed_rows(own, entries),
                indptr=indptr,
                positions=segment.positions[index] - start,
            )
        )
    left, right = halves
    # One move for both: a half's target may be a row that the other half still has to read.
    pool.move(torch.cat(sources), torch.cat([left.row_ids, right.row_ids]))
    return left, right, slots[used:]


def _split_by_kernel(pool: RowPool, segment: Segment, at: int, slots: Tensor) -> tuple[Segment, Segment, Tensor]:
    from laprox_sglang.kernels.pack_rows import split_rows

    before, in_left = segment._numbers_before(), segment.entries_before(at)
    counts = pool.slots_for(in_left), pool.slots_for(segment.entries - in_left)
    used = sum(counts)
    halves = split_rows(pool.k, pool.v, segment.row_ids, segment.positions, segment.indptr, at, in_left, slots, counts)
    sizes = (0, at, slots[: counts[0]]), (at, segment.tokens, slots[counts[0] : used])
    left, right = (
        Segment(end - start, own.clone(), rows, indptr, positions, before[start : end + 1] - before[start])
        for (start, end, own), (rows, positions, indptr) in zip(sizes, halves, strict=True)
    )
    return left, right, slots[used:]


def concatenate(lists: int, parts: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Join CSR parts list by list, keeping the parts' order inside each list.

    Args:
        parts: (row_ids [R_i], indptr [lists + 1]) each.
    Returns: row_ids [sum R_i] int32 and indptr [lists + 1] int64. No host sync.
    """
    if not parts:
        return torch.empty(0, dtype=torch.int32, device=device), torch.zeros(
            lists + 1, dtype=torch.int64, device=device
        )
    if len(parts) == 1:
        return parts[0][0], parts[0][1].long()
    if row_views.on_gpu(device):
        from laprox_sglang.kernels.page_table import Part, page_table

        rows, indptr = page_table([[Part(*part) for part in parts]], 1, lists, 0, device)
        return rows, indptr[0]
    counts = torch.stack([indptr.long().diff() for _, indptr in parts])
    indptr = torch.zeros(lists + 1, dtype=torch.int64, device=device)
    torch.cumsum(counts.sum(0), 0, out=indptr[1:])
    starts = indptr[:-1] + counts.cumsum(0) - counts
    joined = torch.empty(sum(rows.shape[0] for rows, _ in parts), dtype=torch.int32, device=device)
    for (rows, own), start, count in zip(parts, starts, counts, strict=True):
        shift = torch.repeat_interleave(start - own.long()[:-1], count, output_size=rows.shape[0])
        joined[torch.arange(rows.shape[0], device=device) + shift] = rows
    return joined, indptr
