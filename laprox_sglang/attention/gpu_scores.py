"""LaProx scores of a stretch, and the model-wide selection, with the project's Triton kernels: all layers in a few
launches, nothing copied from or to the host. The same numbers as ``policy`` makes from whole tensors.
"""

from __future__ import annotations

import itertools

import torch
import triton
from torch import Tensor

from laprox_sglang.kernels import column_scores, pack_rows, page_table, projected_norm
from laprox_sglang.kernels.launch import device_units
from laprox_sglang.kernels.ragged_extend import ragged_lse_of_layers
from laprox_sglang.kernels.select import select
from laprox_sglang.policy.allocations.base import Allocation
from laprox_sglang.policy.allocations.model import Model, ModelRaw
from laprox_sglang.policy.normalise import layer_normalise
from laprox_sglang.policy.scores.base import Score, ScoreOptions
from laprox_sglang.policy.scores.laprox import LaProx
from laprox_sglang.policy.select import Selection
from laprox_sglang.policy.select import select as policy_select

# Room for the two factors of the layers that are scored at a time.
FACTOR_BYTES = 256 << 20


class GpuScores:
    """Scores of one model.

    Args:
        factors: ``[L, H, D, G * D]`` in the pool's dtype: each query head's factor of W_O, side by side.
        scales, caps: per layer, the softmax scale and the logit cap (0: none).
    """

    def __init__(self, factors: Tensor, scales: list[float], caps: list[float], options: ScoreOptions):
        self.factors = factors.contiguous()
        self.options = options
        alike = itertools.groupby(range(len(scales)), lambda layer: (scales[layer], caps[layer]))
        # (first layer, layer after the last, scale, cap) of adjacent layers that are alike: most often one run
        self.runs = [(layers[0], layers[-1] + 1, *kind) for kind, each in alike for layers in [list(each)]]

    @staticmethod
    def makes(score: Score) -> bool:
        """Whether this is the score that the kernels make."""
        return type(score) is LaProx

    def __call__(
        self, queries: Tensor, k: Tensor, v: Tensor, slots: Tensor, first: int, listed: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """``[L, H, n - first]`` float32: the score of every dense token from ``first`` on.

        queries: [L, W, Hq, D] of the last W tokens. k, v: the pools ``[L, slots + 1, H, D]``. slots: [n] int64 of the
        dense tokens, the window's own last. listed: rows [R] int32 and indptr [L * H + 1] int64 of the compressed
        tokens that the queries see besides, or None.
        """
        layers, heads, n = k.shape[0], k.shape[2], slots.shape[0] - first
        mean = self.options.gqa == "mean_attention"
        group = 1 if mean else queries.shape[2] // heads
        at_once = max(1, FACTOR_BYTES // (2 * 4 * heads * group * n))
        scores = torch.empty(layers, heads, n, dtype=torch.float32, device=k.device)
        for begin, end, scale, cap in self.runs:
            for low in range(begin, end, at_once):
                part = slice(low, min(low + at_once, end))
                lse = column_scores.window_lse(queries[part], k[part], slots, scale, cap)
                if listed is not None:
                    rows, indptr = listed
                    of_part = indptr[part.start * heads : part.stop * heads + 1]
                    k_rows = k.view(-1, k.shape[3])
                    lse = torch.logaddexp(
                        lse, ragged_lse_of_layers(queries[part], k_rows, rows, of_part, heads, scale, cap)
                    )
                attention = column_scores.column_norms(queries[part], k[part], slots, lse, first, scale, cap, mean)
                norms = projected_norm.projected_norm(v[part], slots[first:], self.factors[part], mean)
                column_scores.pooled_scores(attention, norms, self.options.pool_kernel, scores[part])
        return scores

    def warm_up(self, k: Tensor, v: Tensor, window: int, query_heads: int) -> None:
        """Compile all that a compression will run, on the padding slot 0 of the pools."""
        layers, _, heads, head_dim = k.shape
        queries = torch.zeros(layers, window, query_heads, head_dim, dtype=k.dtype, device=k.device)
        slots = torch.zeros(window, dtype=torch.int64, device=k.device)
        nothing = torch.zeros(0, dtype=torch.int32, device=k.device)
        empty = torch.zeros(layers * heads + 1, dtype=torch.int64, device=k.device)
        scores = self(queries, k, v, slots, 0, (nothing, empty))
        splits = 1
        while splits <= triton.next_power_of_2(column_scores.WAVES * device_units(k.device)):
            for begin, end, scale, cap in self.runs:
                column_scores.window_lse(queries[begin:end], k[begin:end], slots, scale, cap, splits)
            splits *= 2
        protected = torch.zeros(window, dtype=torch.bool, device=k.device)
        positions, indptr = select(scores, layers * heads, protected)
        pack_rows.warm_up(k, v, slots[:1], positions, indptr)
        part = page_table.Part(nothing, empty)
        page_table.page_table([[part, part]], 1, layers * heads, 0, k.device)


def select_entries(scores: Tensor, total: int, allocation: Allocation, protected: Tensor, stretch: int) -> Selection:
    """``policy.select.select``; a model-wide allocation with the kernel, any other in torch. Neither waits."""
    if type(allocation) not in (Model, ModelRaw):
        return policy_select(scores, total, allocation, protected, stretch)
    if allocation.normalised:
        scores = layer_normalise(scores)
    return Selection(*select(scores[:, :, :stretch], total, protected[:stretch]))
