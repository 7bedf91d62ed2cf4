"""The parts that scores are made of. All of them work per query head and know nothing of the group rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView

# The projected values of a long stretch take G times the room of its values; this bounds them.
_TOKENS_AT_ONCE = 8192


def attention_mean(view: LayerView) -> Tensor:
    """[H, G, n] float32: mean attention that a token gets from the queries that can see it."""
    return view.probabilities().sum(dim=2) / _observers(view)


def attention_norm(view: LayerView) -> Tensor:
    """[H, G, n] float32: L2 norm ||A[:, t]|| of a token's attention column (arXiv 2605.07234, the attention factor).

    A token inside the window is seen by only `visible` of the W queries; its norm is scaled by sqrt(W / visible),
    so that the newest tokens are not held to be worthless for being new.
    """
    # square().sum() is 15 times as fast as torch.linalg.vector_norm over a strided dimension on a CPU
    squares = view.probabilities().square().sum(dim=2) if view.column_squares is None else view.column_squares
    if view.visible is not None:
        squares = squares * (view.queries / view.visible.clamp(min=1))
    return squares.sqrt()


def attention_variance(view: LayerView) -> Tensor:
    """[H, G, n] float32: sample variance of a token's attention over the queries that see it, 0 for a single one."""
    count = _observers(view)
    squares = view.probabilities().square().sum(dim=2) - attention_mean(view).square() * count
    return squares.clamp(min=0) / (count - 1).clamp(min=1)


def value_norms(values: Tensor, projection: Tensor) -> Tensor:
    """||v_t W_O^i|| of every query head, through the D x D factor: nothing of the hidden size is formed.

    values: [n, H, D] any float dtype. projection: [H, G, D, D] float32 (see LayerView). Returns [H, G, n] float32.
    """
    heads, group, size, _ = projection.shape
    # one matrix product per kv head serves its whole group: [tokens, D] x [D, G*D]
    joined = projection.transpose(1, 2).reshape(heads, size, group * size)
    norms = [
        part.float().transpose(0, 1).bmm(joined).view(heads, part.shape[0], group, size).norm(dim=-1)
        for part in values.split(_TOKENS_AT_ONCE)
    ]
    return torch.cat(norms, dim=1).transpose(1, 2)


def output_l1_norms(view: LayerView) -> Tensor:
    """[H, n] float32: ||v_t W_O^i||_1, mean over the group (CriticalKV, arXiv 2502.03805).

    The hidden-size projection is formed for one query head and a bounded number of tokens at a time.
    """
    weights = view.output_weights()
    group = weights.shape[1]
    parts = []
    for values in view.values.split(_TOKENS_AT_ONCE):
        values = values.to(weights.dtype).transpose(0, 1)
        norms = [values.bmm(weights[:, index]).float().abs().sum(dim=-1) for index in range(group)]
        parts.append(torch.stack(norms).mean(dim=0))
    return torch.cat(parts, dim=1)


def pool(factor: Tensor, kernel: int) -> Tensor:
    """Average of each token with its neighbours, [..., n] -> [..., n]; at the ends, of those that exist.

    Values that span several tokens survive whole or not at all, so neighbours must rise together
    (SnapKV, arXiv 2404.14469).
    """
    if kernel == 1:
        return factor
    tokens = factor.shape[-1]
    rows = factor.reshape(-1, tokens)
    return F.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2, count_include_pad=False).view(factor.shape)


def _observers(view: LayerView) -> Tensor:
    """[n] or [1] float32: by how many queries a token is seen."""
    if view.visible is None:
        return view.projection.new_full((1,), view.queries)
    return view.visible.clamp(min=1)
