"""The row view of SGLang's KV pool: any row of any slot can store any entry.

K of all layers is one tensor ``[L, slots + 1, H, D]`` (V likewise). A *row* is ``D`` numbers of it, addressed by
``row = (layer * (slots + 1) + slot) * H + head``. A slot owns ``L * H`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INT32_ROWS = 2**31 - 1


def on_gpu(device: torch.device) -> bool:
    """Whether rows are moved and listed by the Triton kernels (``laprox_sglang.kernels``) rather than in torch."""
    return device.type == "cuda"


class PoolTooLargeError(ValueError):
    """The pool has more rows than FlashInfer's int32 indices can address."""


@dataclass(frozen=True)
class RowPool:
    """Row addressing over the two pool tensors.

    Attributes:
        k, v: ``[L, slots + 1, H, D]``, contiguous, the storage that SGLang's per-layer buffers are views of.
    """

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        if not (self.k.is_contiguous() and self.v.is_contiguous()) or self.k.shape != self.v.shape:
            raise ValueError(f"the pool tensors must be contiguous and equal in shape: {self.k.shape}, {self.v.shape}")
        rows = self.k.numel() // self.k.shape[-1]
        if rows > INT32_ROWS:
            raise PoolTooLargeError(
                f"the KV pool has {rows} rows (layers x slots x KV heads), more than int32 row ids can address "
                f"({INT32_ROWS}); start with --max-total-tokens {INT32_ROWS // (self.layers * self.heads) - 1}"
            )

    @property
    def layers(self) -> int:
        return self.k.shape[0]

    @property
    def slot_stride(self) -> int:
        """Slots per layer, the padding slot 0 included."""
        return self.k.shape[1]

    @property
    def heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def rows_per_slot(self) -> int:
        return self.layers * self.heads

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def k_rows(self) -> Tensor:
        """``[rows, D]`` view."""
        return self.k.view(-1, self.head_dim)

    @property
    def v_rows(self) -> Tensor:
        return self.v.view(-1, self.head_dim)

    def slots_for(self, entries: int) -> int:
        """Slots that ``entries`` packed entries take."""
        return -(-entries // self.rows_per_slot)

    def packed_rows(self, slots: Tensor, entries: int) -> Tensor:
        """Row ids of the first ``entries`` rows of ``slots``, in packing order.

        The order is (layer, slot, head), so that a list's consecutive entries lie side by side when the slots do.

        Args:
            slots: ``[s]`` int64.
            entries: at most ``s * L * H``.
        Returns: ``[entries]`` int32.
        """
        count = slots.shape[0]
        if entries > count * self.rows_per_slot:
            raise ValueError(f"{entries} entries do not fit {count} slots of {self.rows_per_slot} rows")
        if count == 0:
            return torch.empty(0, dtype=torch.int32, device=slots.device)
        index = torch.arange(entries, device=slots.device)
        layer = index // (count * self.heads)
        slot = slots[(index // self.heads) % count]
        return ((layer * self.slot_stride + slot) * self.heads + index % self.heads).to(torch.int32)

    def own_rows(self, lists: Tensor, slots: Tensor) -> Tensor:
        """Row ids of dense entries: ``lists`` [R] (layer * H + head), ``slots`` [R] -> [R] int32."""
        layer, head = lists // self.heads, lists % self.heads
        return ((layer * self.slot_stride + slots) * self.heads + head).to(torch.int32)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy K and V of rows ``source`` to rows ``target`` (both [R]); the two sets may overlap."""
        source, target = source.long(), target.long()
        for rows in (self.k_rows, self.v_rows):
            rows[target] = rows[source]
