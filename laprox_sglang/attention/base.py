"""The contract of ragged attention: per-batch metadata, the abstract class, and the choice of an implementation.

A new implementation is one file with a subclass of RaggedAttention and one line in ``IMPLEMENTATIONS``; give it a
place in ``tests/attention/test_implementations.py``, which checks it against ``torch_reference``.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from laprox_sglang.config import GPU_KERNELS


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to the device without waiting for what the device is doing.

    Pinned memory makes the copy asynchronous; torch reuses that memory only after the copy is done.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class RaggedBatch:
    """What all layers of one step read. B requests, L layers, H kv heads, T new tokens in all.

    A request's keys for one layer and kv head are its listed rows (the compressed prefix, any order, maybe none) and
    then its dense tail, the tokens [tail_start, seq_len), which holds the new tokens and so is never empty.
    Row ids index ``k.view(-1, D)`` of a pool ``k [L, slots + 1, H, D]``: ``(layer * (slots + 1) + slot) * H + head``.
    """

    rows: Tensor
    """[N] int32, the listed row ids of all requests, by request, layer, head."""
    indptr: Tensor
    """[B, L * H + 1] int64, offsets into rows; list (b, l, h) is rows[indptr[b, l*H+h] : indptr[b, l*H+h+1]]."""
    slots: Tensor
    """[pool rows, max tokens] int32, SGLang's whole req_to_token table."""
    pool_index: Tensor
    """[B] int64, each request's row of ``slots``."""
    tail_start: Tensor
    """[B] int64, position of the first dense token; at most the position of the first new token."""
    seq_len: Tensor
    """[B] int64, logical length, new tokens included."""
    q_start: Tensor
    """[B + 1] int64, offsets of each request's new tokens in q; they are its last positions."""
    tail_start_host: np.ndarray
    seq_len_host: np.ndarray
    q_start_host: np.ndarray
    num_kv_heads: int

    @cached_property
    def indptr_host(self) -> np.ndarray:
        """``indptr`` on the host. Where ``build`` was given a tensor on a GPU, the first read waits for the device."""
        return self.indptr.cpu().numpy()

    @cached_property
    def row_work(self) -> np.ndarray:
        """[B] int64 on the host, (new token, row) pairs of a request in one list, in the mean over its lists."""
        listed = (self.indptr_host[:, -1] - self.indptr_host[:, 0]) // (self.indptr_host.shape[1] - 1)
        return self.q_len_host * (listed + self.seq_len_host - self.tail_start_host)

    @classmethod
    def build(
        cls,
        *,
        rows: Tensor,
        indptr: np.ndarray | Tensor,
        slots: Tensor,
        pool_index: Sequence[int] | np.ndarray,
        tail_start: Sequence[int] | np.ndarray,
        seq_len: Sequence[int] | np.ndarray,
        q_len: Sequence[int] | np.ndarray,
        num_kv_heads: int,
    ) -> RaggedBatch:
        """Make the device copies (on the device of ``rows``) of metadata that is known on the host.

        ``indptr`` may be known on the device only.
        """

        def host(values: Sequence[int] | np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(values, dtype=np.int64)

        q_start = np.zeros(len(q_len) + 1, dtype=np.int64)
        np.cumsum(q_len, out=q_start[1:])
        starts, lengths = host(tail_start), host(seq_len)
        lists = indptr if isinstance(indptr, Tensor) else upload(host(indptr), rows.device)
        batch = cls(
            rows=rows,
            indptr=lists,
            slots=slots,
            pool_index=upload(host(pool_index), rows.device),
            tail_start=upload(starts, rows.device),
            seq_len=upload(lengths, rows.device),
            q_start=upload(q_start, rows.device),
            tail_start_host=starts,
            seq_len_host=lengths,
            q_start_host=q_start,
            num_kv_heads=num_kv_heads,
        )
        if not isinstance(indptr, Tensor):
            batch.__dict__["indptr_host"] = host(indptr)
        return batch

    @property
    def size(self) -> int:
        return self.indptr.shape[0]

    @property
    def num_layers(self) -> int:
        return (self.indptr.shape[1] - 1) // self.num_kv_heads

    @property
    def q_len_host(self) -> np.ndarray:
        """[B] int64, new tokens of each request."""
        return np.diff(self.q_start_host)

    def slot_stride(self, k_rows: Tensor) -> int:
        """Slots of one layer (slots + 1) in the pool that ``k_rows`` [L * (slots + 1) * H, D] views."""
        return k_rows.shape[0] // (self.num_layers * self.num_kv_heads)

    def check(self, k_rows: Tensor) -> None:
        """Raise ValueError where the metadata contradicts itself or the pool. Reads device memory: for tests."""
        lists = self.indptr.shape[1] - 1
        if lists % self.num_kv_heads:
            raise ValueError(f"indptr has {lists} lists, no multiple of {self.num_kv_heads} kv heads")
        if k_rows.shape[0] % lists:
            raise ValueError(f"{k_rows.shape[0]} rows are no whole pool of {lists} lists")
        if (np.diff(self.indptr_host, axis=1) < 0).any() or self.indptr_host.min() < 0:
            raise ValueError("indptr is not ascending")
        if self.indptr_host.max() > self.rows.numel():
            raise ValueError(f"indptr ends at {self.indptr_host.max()}, but there are {self.rows.numel()} rows")
        if ((self.rows < 0) | (self.rows >= k_rows.shape[0])).any():
            raise ValueError("a row id lies outside the pool")
        if (self.q_len_host < 1).any():
            raise ValueError("a request has no new token")
        if (self.tail_start_host > self.seq_len_host - self.q_len_host).any() or (self.tail_start_host < 0).any():
            raise ValueError("tail_start must lie at or before the first new token: new tokens are dense")


class RaggedAttention(abc.ABC):
    """Attention of new tokens over ragged lists of KV rows and a dense tail. Stateless apart from scratch memory.

    Query head i reads kv head ``i // G`` with ``G = Hq // H``. ``k_rows`` and ``v_rows`` [rows, D] are views of the
    pools; the new tokens' K and V are already written there. ``logit_cap`` c > 0 turns a scaled logit x into
    ``c * tanh(x / c)``. Accumulation is float32 at least, whatever the pool's dtype.
    """

    name: str
    needs_host_lists = True
    """Whether ``indptr_host`` is read. Where it is not, nothing waits for offsets that the device computed."""
    recordable = False
    """Whether a decode step may be recorded in a CUDA graph: fixed launches, no host value, and lists that may lie at
    any distance from ``rows`` (see ``static_batch``)."""

    def refusal(self, query_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
        """Why a pool of this shape and dtype cannot be read; None when it can."""
        return None

    @abc.abstractmethod
    def forward(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        logit_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [T, Hq, D] in q's dtype, in ``out`` when it is given.

        q: [T, Hq, D]. A new token at position p sees all listed rows of its (layer, kv head) and the dense tail up to
        and including p.
        """

    @abc.abstractmethod
    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        """Return [B, W, Hq] float32: log-sum-exp of q's logits over the listed rows only; -inf for an empty list.

        q: [B, W, Hq, D], W queries for each request. Reads only ``rows``, ``indptr`` and their host copies.
        """

    def warm_up(self, dtype: torch.dtype, head_dim: int, group: int) -> None:  # noqa: B027 - nothing to do by default
        """Compile what a server with this pool dtype, D and G will run, so that no request waits for it."""


IMPLEMENTATIONS = {
    "torch": ("laprox_sglang.attention.torch_reference", "TorchRaggedAttention"),
    "cpu": ("laprox_sglang.attention.cpu_sdpa", "CpuRaggedAttention"),
    "numba": ("laprox_sglang.attention.cpu_numba", "NumbaRaggedAttention"),
    "sdpa": ("laprox_sglang.attention.cpu_sdpa", "SdpaRaggedAttention"),
    "triton": ("laprox_sglang.attention.gpu_triton", "TritonRaggedAttention"),
    "flashinfer": ("laprox_sglang.attention.gpu_flashinfer", "FlashInferRaggedAttention"),
}
DEFAULT_FOR_DEVICE = {"cpu": "cpu", "cuda": "triton"}


def create(name: str) -> RaggedAttention:
    """Make the implementation called ``name``. Raises ValueError for an unknown name."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown ragged attention {name!r}; choose from {', '.join(sorted(IMPLEMENTATIONS))}")
    module, class_name = IMPLEMENTATIONS[name]
    return getattr(importlib.import_module(module), class_name)()


def choose(device: torch.device | str, kernels: str = "auto") -> RaggedAttention:
    """Make the implementation that ``--laprox-kernels`` names; ``auto`` is the device's default.

    Any device without a default of its own gets the plain torch one. Raises ValueError, with the remedy, for kernels
    that the device cannot run.
    """
    kind = torch.device(device).type
    if kernels == "auto":
        return create(DEFAULT_FOR_DEVICE.get(kind, "torch"))
    if kernels in GPU_KERNELS and kind != "cuda":
        raise ValueError(f"--laprox-kernels {kernels} needs a CUDA device, and this server runs on {kind}; use auto")
    return create(kernels)
