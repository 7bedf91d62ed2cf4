"""The one list of policies that every policy test runs over: what the registry knows, so none can be left out."""

from __future__ import annotations

from itertools import product

import torch

from laprox_sglang.policy.registry import allocation_names, score_names
from laprox_sglang.policy.scores.base import LayerView

torch.set_num_threads(1)

SCORES = score_names()
ALLOCATIONS = allocation_names()
POLICIES = list(product(SCORES, ALLOCATIONS))


def make_view(
    tokens: int,
    heads: int = 2,
    group: int = 2,
    window: int = 5,
    size: int = 4,
    own: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LayerView:
    """A random view of `tokens` tokens, of which the last `own` are the window's (the last queries' own)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, group, window, tokens, generator=generator)
    query, token = torch.arange(window).unsqueeze(1), torch.arange(tokens)
    # query w stands at the place of token tokens - window + w when the window's own tokens are scored
    sees = token <= tokens - window + query if own else torch.ones(window, tokens, dtype=torch.bool)
    attention = logits.masked_fill(~sees, float("-inf")).softmax(-1)
    visible = sees.sum(0).float() if own else None
    values = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    projection = torch.randn(heads, group, size, size, generator=generator)
    return LayerView(attention, values, projection, visible)
