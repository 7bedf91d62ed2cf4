"""The batch that a recorded decode step reads: buffers at fixed addresses, filled before each replay.

A CUDA graph holds addresses, so what changes from step to step must stand in buffers that do not move. Of a step with
compressed tokens these are the lists' offsets and the start of each dense tail; lengths and rows of ``req_to_token``
are SGLang's own static buffers, so a step whose requests are those of the step before copies nothing. The listed rows
themselves are not copied: they stay where their page table is, and an offset counts from one fixed address to there.
So a graph has no bound on list lengths, and lists may be shorter or longer than those it was recorded with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laprox_sglang.attention.base import RaggedBatch, upload

ENTRY = 4  # bytes of an int32 row id


@dataclass(frozen=True)
class Lists:
    """One request's lists: ``rows`` [R] int32, ``indptr`` [L * H + 1] int64, and where its dense tail starts."""

    rows: Tensor
    indptr: Tensor
    end: int

    def __post_init__(self) -> None:
        if self.rows.dtype != torch.int32 or not self.rows.is_contiguous():
            raise ValueError("row ids must be contiguous int32")

    def same_rows(self, other: Lists | None) -> bool:
        return other is not None and other.rows is self.rows and other.indptr is self.indptr and other.end == self.end


class StaticBatch:
    """At most ``most_requests`` requests of a model with ``lists`` = L * H lists each.

    It keeps the rows of the last fill alive, because a replay that is still queued reads them. Later fills are ordered
    behind that replay: both are launched on the forward stream.

    Args:
        slots: SGLang's whole ``req_to_token``, ``[pool rows, max tokens]`` int32.
    """

    def __init__(self, most_requests: int, lists: int, num_kv_heads: int, slots: Tensor):
        device = slots.device
        self.num_kv_heads = num_kv_heads
        self.slots = slots
        self.base = torch.zeros(ENTRY, dtype=torch.int32, device=device)
        self.indptr = torch.zeros((most_requests, lists + 1), dtype=torch.int64, device=device)
        self.tail_start = torch.zeros(most_requests, dtype=torch.int64, device=device)
        self.q_start = torch.arange(most_requests + 1, device=device)
        self._no_lists = torch.zeros(lists + 1, dtype=torch.int64, device=device)
        self._filled: list[Lists | None] = [None] * most_requests

    def fill(self, requests: Sequence[Lists | None], padded: int) -> None:
        """Make the buffers say what ``requests`` read (None: nothing listed); requests up to ``padded`` are empty.

        Writes only what differs from the last fill. Never waits for the device.
        """
        wanted = [*requests, *[None] * (padded - len(requests))]
        changed = [b for b, lists in enumerate(wanted) if not _same(lists, self._filled[b])]
        if not changed:
            return
        distinct: dict[int, int] = {}
        offsets, indptrs, which, starts = [0], [self._no_lists], [], []
        for b in changed:
            lists = wanted[b]
            self._filled[b] = lists
            starts.append(0 if lists is None else lists.end)
            if lists is None:
                which.append(0)
                continue
            if id(lists.rows) not in distinct:
                distinct[id(lists.rows)] = len(indptrs)
                indptrs.append(lists.indptr)
                # No rows: no address either, and nothing that is read.
                distance = lists.rows.data_ptr() - self.base.data_ptr() if lists.rows.numel() else 0
                offsets.append(distance // ENTRY)
            which.append(distinct[id(lists.rows)])
        numbers = upload(np.array([*changed, *which, *starts, *offsets], dtype=np.int64), self.base.device)
        index, choice, start, offset = numbers.split([len(changed)] * 3 + [len(offsets)])
        self.indptr[index] = (torch.stack(indptrs) + offset[:, None])[choice]
        self.tail_start[index] = start

    def batch(self, pool_index: Tensor, seq_len: Tensor) -> RaggedBatch:
        """What the layers of a step with B = ``len(pool_index)`` requests read; both [B] int64 at fixed addresses.

        Its host copies are empty: a recorded step must not depend on them.
        """
        size, unknown = pool_index.shape[0], np.empty(0, dtype=np.int64)
        return RaggedBatch(
            rows=self.base,
            indptr=self.indptr[:size],
            slots=self.slots,
            pool_index=pool_index,
            tail_start=self.tail_start[:size],
            seq_len=seq_len,
            q_start=self.q_start[: size + 1],
            tail_start_host=unknown,
            seq_len_host=unknown,
            q_start_host=unknown,
            num_kv_heads=self.num_kv_heads,
        )


def _same(wanted: Lists | None, filled: Lists | None) -> bool:
    return filled is None if wanted is None else wanted.same_rows(filled)
