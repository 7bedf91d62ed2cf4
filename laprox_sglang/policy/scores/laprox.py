"""LaProx: what the layer's output would lose with the entry."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import attention_norm, pool, value_norms


class LaProx(Score):
    """``||A[:, t]||_2 * ||v_t W_O^i||_2`` (arXiv 2605.07234), the attention factor pooled over neighbouring tokens.

    Entry t of head i adds the rank-one matrix ``A[:, t] (v_t W_O^i)`` to the window's output; its Frobenius norm is
    that product. The kv head's score joins its group by options.gqa: ``mean_attention`` is the product of the two
    factors' means, ``mean_score`` the mean of the products.
    """

    reads_attention = False

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        attention = attention_norm(view)
        norms = value_norms(view.values, view.projection) if view.norms is None else view.norms
        if options.gqa == "mean_attention":
            return pool(attention.mean(dim=1), options.pool_kernel) * norms.mean(dim=1)
        return (pool(attention, options.pool_kernel) * norms).mean(dim=1)
