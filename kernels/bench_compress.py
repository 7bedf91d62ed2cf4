"""What compressing a long prompt costs: scores, selection and packing of all layers, beside the prefill's own time.

The prefill is not run. Its matrix products alone, at the speed that this device reaches in a large one, take a time
that no prefill can beat: so the share printed is the most that compression can add to one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .column_scores import column_norms, pooled_scores, window_lse
from .decode_plan import DecodePlan, pieces_for, plan_decode
from .pack_rows import pack_rows
from .projected_norm import projected_norm
from .ragged_decode import BLOCK_N
from .select import select
from .shapes import ModelShape

TOKENS, KEPT, WINDOW, POOL_KERNEL, SINK, BATCH = 131072, 0.05, 32, 21, 4, 8


@dataclass
class Step:
    """``share`` of the least time of a prefill of the same tokens; None for what is no part of a compression."""

    model: str
    name: str
    seconds: float
    share: float | None = None


@dataclass
class Stretch:
    """A dense stretch of n tokens and all that its compression reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    factors: Tensor
    protected: Tensor
    kept: int

    @classmethod
    def make(cls, shape: ModelShape, tokens: int, kept: float, device: str, dtype: torch.dtype) -> Stretch:
        layers, heads, size = shape.layers, shape.kv_heads, shape.head_dim
        generator = torch.Generator(device).manual_seed(0)

        def random(*of: int) -> Tensor:
            return torch.randn(of, generator=generator, device=device, dtype=dtype)

        return cls(
            q=random(layers, min(WINDOW, tokens), shape.query_heads, size),
            k=random(layers, tokens + 1, heads, size),
            v=random(layers, tokens + 1, heads, size),
            slots=torch.arange(1, tokens + 1, device=device),
            factors=random(layers, heads, size, shape.group * size),
            protected=torch.arange(tokens, device=device) < SINK,
            kept=max(1, round(kept * tokens)),
        )

    def scores(self) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        lse = window_lse(self.q, self.k, self.slots, scale)
        attention = column_norms(self.q, self.k, self.slots, lse, 0, scale)
        return pooled_scores(attention, projected_norm(self.v, self.slots, self.factors), POOL_KERNEL)

    def selection(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return select(scores, self.kept * scores.shape[0] * scores.shape[1], self.protected)

    def pack(self, positions: Tensor, indptr: Tensor) -> Tensor:
        return pack_rows(self.k, self.v, self.slots, positions, indptr, self.kept)


def prefill_flops(shape: ModelShape, tokens: int) -> float:
    """Of the matrix products: each token's own weights, and causal attention."""
    experts = max(1, shape.experts_per_token)
    weights = shape.layers * (shape.layer_weights + shape.expert_weights * experts)
    attention = 2 * tokens * shape.layers * shape.query_heads * shape.head_dim
    return tokens * (2.0 * weights + attention)


def matmul_speed(device: str) -> float:
    """Floating point operations per second in a large bfloat16 product."""
    size = 8192
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: one @ other)


def _seconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, return_mode="median")) / 1e3


def time_compression(shape: ModelShape, device: str, speed: float, tokens: int = TOKENS) -> list[Step]:
    """Scores, selection, packing, their sum; and the plan of a decode step of 8 requests, made once for all layers."""
    stretch = Stretch.make(shape, tokens, KEPT, device, torch.bfloat16)
    scores = stretch.scores()
    selection = stretch.selection(scores)
    calls: dict[str, Callable[[], object]] = {
        "scores": stretch.scores,
        "selection": lambda: stretch.selection(scores),
        "packing": lambda: stretch.pack(*selection),
    }
    seconds = {name: _seconds(call) for name, call in calls.items()}
    seconds["all of it"] = sum(seconds.values())
    least = prefill_flops(shape, tokens) / speed
    steps = [Step(shape.name, f"{name}, {tokens:,} tokens", took, took / least) for name, took in seconds.items()]
    steps.append(Step(shape.name, f"plan of a decode step, batch {BATCH}", time_plan(shape, selection[1], device)))
    return steps


def time_plan(shape: ModelShape, indptr: Tensor, device: str) -> float:
    """Seconds of the plan of one decode step of ``BATCH`` requests with these lists, all layers."""
    lists = BATCH * shape.kv_heads
    offsets = indptr.long().expand(BATCH, -1).contiguous()
    start, length = (torch.full((BATCH,), value, device=device) for value in (0, WINDOW))
    pieces = pieces_for(lists, shape.head_dim, offsets.device)
    plan = DecodePlan.empty(shape.layers, lists, offsets.device, pieces)
    return _seconds(lambda: plan_decode(offsets, start, length, shape.kv_heads, BLOCK_N, plan))


def room_for(shape: ModelShape, tokens: int = TOKENS) -> bool:
    """Whether the device has the memory: pools of all layers, factors of the score, scores, scratch."""
    pools = 2 * shape.layers * tokens * shape.kv_heads * shape.head_dim * 2
    scores = 6 * 4 * shape.layers * shape.kv_heads * tokens
    return bool(torch.cuda.mem_get_info()[0] > pools + scores + 2**30)


def line(step: Step) -> str:
    share = "" if step.share is None else f" {step.share:>8.2%} of the least time of a prefill"
    return f"{step.model:<14} {step.name:<34} {step.seconds * 1e3:>9.3f} ms{share}"
