"""Random ragged batches. Every pool row that nothing may read is NaN, and so is every slot that nothing may use."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from laprox_sglang.attention.base import RaggedBatch


@dataclass
class Case:
    q: torch.Tensor
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    layer: int
    batch: RaggedBatch
    scale: float

    def arguments(self) -> tuple:
        return self.q, self.k_rows, self.v_rows, self.layer, self.batch, self.scale

    def poisoned_out(self) -> torch.Tensor:
        return torch.full_like(self.q, float("nan"))

    def to(self, device: str) -> Case:
        moved = {name: value.to(device) for name, value in vars(self.batch).items() if isinstance(value, torch.Tensor)}
        tensors = (tensor.to(device) for tensor in (self.q, self.k_rows, self.v_rows))
        return Case(*tensors, self.layer, replace(self.batch, **moved), self.scale)


def make_case(
    q_len: list[int],
    tail: list[int],
    lists: list[int],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    layer: int = 1,
    sharpness: float = 2.0,
) -> Case:
    """``q_len[b]`` new tokens, ``tail[b]`` dense tokens (new ones included), lists of at most ``lists[b]`` rows.

    List lengths are drawn from {0, 1, lists[b], anything between}; the first list of a request has lists[b] rows, its
    last one none. Rows are out of order and come from any layer and head, as packed entries do.
    """
    name = repr((q_len, tail, lists, kv_heads, group, head_dim, layers, layer))
    random = np.random.default_rng(zlib.crc32(name.encode()))
    requests = len(q_len)
    prefix = [int(random.integers(0, 50)) if longest else 0 for longest in lists]
    seq_len = [p + t for p, t in zip(prefix, tail, strict=True)]

    per_layer = kv_heads * layers
    lengths = np.zeros((requests, per_layer), dtype=np.int64)
    for b, longest in enumerate(lists):
        choices = [0, 1, longest, *random.integers(0, longest + 1, size=3).tolist()]
        lengths[b] = np.minimum(random.choice(choices, size=per_layer), longest)
        lengths[b, layer * kv_heads] = longest
        if kv_heads > 1:
            lengths[b, (layer + 1) * kv_heads - 1] = 0
    list_slots = -(-int(lengths.sum()) // per_layer)
    pool_slots = 1 + sum(tail) + list_slots + 3
    order = 1 + random.permutation(pool_slots - 1)
    dense, packed = order[: sum(tail)], order[sum(tail) : sum(tail) + list_slots]

    heads = np.arange(kv_heads)
    all_rows = (np.arange(layers)[:, None, None] * pool_slots + packed[None, :, None]) * kv_heads + heads
    rows = random.permutation(all_rows.reshape(-1))[: int(lengths.sum())].astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths.reshape(-1))])
    indptr = np.stack([offsets[b * per_layer : (b + 1) * per_layer + 1] for b in range(requests)])

    table = np.zeros((requests + 3, max(seq_len) + 5), dtype=np.int32)
    pool_index = random.permutation(requests + 3)[:requests]
    ends = np.cumsum(tail)
    for b in range(requests):
        table[pool_index[b], prefix[b] : seq_len[b]] = dense[ends[b] - tail[b] : ends[b]]

    readable = np.zeros((layers, pool_slots, kv_heads), dtype=bool)
    readable[layer, dense] = True
    readable.reshape(-1)[rows] = True
    generator = torch.Generator().manual_seed(int(random.integers(1 << 30)))
    k_rows, v_rows = (torch.randn(readable.size, head_dim, generator=generator).to(dtype) for _ in range(2))
    unreadable = torch.from_numpy(~readable.reshape(-1))
    k_rows[unreadable], v_rows[unreadable] = float("nan"), float("nan")
    q = sharpness * torch.randn(sum(q_len), kv_heads * group, head_dim, generator=generator)

    batch = RaggedBatch.build(
        rows=torch.from_numpy(rows),
        indptr=indptr,
        slots=torch.from_numpy(table),
        pool_index=pool_index,
        tail_start=prefix,
        seq_len=seq_len,
        q_len=q_len,
        num_kv_heads=kv_heads,
    )
    batch.check(k_rows)
    return Case(q.to(dtype), k_rows, v_rows, layer, batch, head_dim**-0.5)


SHAPES = {
    "decode_one": dict(q_len=[1], tail=[1], lists=[0]),
    "decode_lists": dict(q_len=[1, 1, 1], tail=[1, 33, 70], lists=[63, 1, 100]),
    "decode_long": dict(q_len=[1, 1], tail=[17, 2], lists=[2000, 700], kv_heads=1),
    "decode_five": dict(q_len=[1] * 5, tail=[1, 2, 3, 64, 65], lists=[0, 5, 0, 129, 31], kv_heads=3),
    "extend_short": dict(q_len=[2, 16, 5], tail=[2, 40, 70], lists=[64, 0, 257]),
    "extend_long": dict(q_len=[40, 17], tail=[40, 70], lists=[100, 3]),
    "mixed": dict(q_len=[1, 33, 4, 1, 20], tail=[9, 63, 4, 1, 21], lists=[300, 0, 17, 1, 65], kv_heads=3),
    "first_layer": dict(q_len=[3, 1], tail=[5, 1], lists=[40, 41], layer=0, layers=3),
}
TYPES_AND_HEADS = [
    (torch.bfloat16, 1, 64),
    (torch.bfloat16, 3, 80),
    (torch.bfloat16, 7, 128),
    (torch.float16, 3, 64),
    (torch.float32, 7, 64),
    (torch.float32, 1, 128),
]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Bounds against a float64 oracle that reads the same rounded inputs: half an ulp of the output, and the sums."""
    if dtype == torch.float32:
        return dict(rtol=1e-5, atol=1e-5)
    return dict(rtol=1e-2, atol=5e-3) if dtype == torch.bfloat16 else dict(rtol=2e-3, atol=1e-3)
