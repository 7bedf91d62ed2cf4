"""H2O: heavy hitters, the tokens that got most attention over the whole prompt."""

from __future__ import annotations

from torch import Tensor

from laprox_sglang.policy.scores.base import LayerView, Score, ScoreOptions
from laprox_sglang.policy.scores.parts import pool


class H2O(Score):
    """Attention summed over all the prompt's queries, mean over the group (H2O, arXiv 2306.14048).

    A sum, not a mean over the queries that see a token: older tokens collect more, as in the paper. Of its two halves
    of the budget this is the heavy hitters' one; the recent tokens are the window, which stays whole, as in the field's
    re-implementations (KVCache-Factory). The paper evicts step by step while the prompt is read; here once at its end,
    with the attention of the uncompressed prompt.

    A server keeps the last window's queries only and refuses this score; the evaluation records all of them.
    """

    every_query = True

    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        return pool(view.probabilities().sum(dim=2).mean(dim=1), options.pool_kernel)
