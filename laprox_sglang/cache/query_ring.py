"""The post-RoPE queries of each running request's last tokens: all that scoring needs from inside the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.attention.base import upload

# Under overlap scheduling one decode step may have been launched past a request's end; its query must not push out
# the oldest one of the window.
SLACK = 4


class QueryRing:
    """``[L, rows, capacity, Hq, D]``; the query of position p of the request in row r is at ``[:, r, p % capacity]``.

    Rows are SGLang's ``req_pool_idx`` (row 0 takes the writes of padded tokens).
    """

    def __init__(
        self, layers: int, rows: int, window: int, query_heads: int, head_dim: int, dtype: torch.dtype, device: object
    ):
        self.window = window
        self.capacity = window + SLACK
        self.buffer = torch.zeros(
            (layers, rows, self.capacity, query_heads, head_dim), dtype=dtype, device=torch.device(str(device))
        )

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    def store(self, layer: int, query: Tensor, plan: RingPlan) -> None:
        """``query`` [T, Hq, D] or [T, Hq * D]: all new tokens of the batch; ``plan`` says which go where."""
        rows = self.buffer[layer].view(-1, *self.buffer.shape[3:])
        query = query.view(-1, *self.buffer.shape[3:])
        rows[plan.target] = query if plan.source is None else query[plan.source]

    def read(self, row: int, end: int, count: int) -> Tensor:
        """Queries of positions ``[end - count, end)``: ``[L, count, Hq, D]``."""
        if count > self.window:
            raise ValueError(f"the ring holds the last {self.window} queries, not {count}")
        index = torch.arange(end - count, end, device=self.buffer.device) % self.capacity
        return self.buffer[:, row].index_select(1, index)

    def decode_plan(self, rows: Tensor, seq_lens: Tensor, out: Tensor | None = None) -> RingPlan:
        """For one new token per request, from what is on the device: nothing is copied, so a CUDA graph can hold it.

        ``rows`` and ``seq_lens`` [B] int64, the new token counted; the targets go to ``out`` [B] where it is given.
        """
        return RingPlan(None, torch.add((seq_lens - 1) % self.capacity, rows, alpha=self.capacity, out=out))

    def plan(self, rows: list[int], starts: list[int], lengths: list[int]) -> RingPlan:
        """For a batch whose request i computes tokens ``[starts[i], starts[i] + lengths[i])`` in row ``rows[i]``."""
        source, target, offset = [], [], 0
        for row, start, length in zip(rows, starts, lengths, strict=True):
            count = min(length, self.capacity)
            positions = torch.arange(start + length - count, start + length)
            source.append(positions - start + offset)
            target.append(row * self.capacity + positions % self.capacity)
            offset += length
        device = self.buffer.device
        return RingPlan(upload(torch.cat(source).numpy(), device), upload(torch.cat(target).numpy(), device))


class RingPlan:
    """Where a batch's queries go: ``source`` [S] token of the batch (None: all, in order), ``target`` [S] ring row."""

    __slots__ = ("source", "target")

    def __init__(self, source: Tensor | None, target: Tensor):
        self.source = source
        self.target = target
