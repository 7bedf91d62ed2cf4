"""The one list of policies that every policy test runs over: what the registry knows, so none can be left out."""

from __future__ import annotations

from itertools import product

import torch

from laprox_sglang.policy.allocations.base import Allocation
from laprox_sglang.policy.allocations.profile import Profile
from laprox_sglang.policy.registry import allocation_names, get_allocation, score_names
from laprox_sglang.policy.scores.base import LayerView

torch.set_num_threads(1)

SCORES = score_names()
ALLOCATIONS = allocation_names()
POLICIES = list(product(SCORES, ALLOCATIONS))
HIDDEN = 6


def head_shares(layers: int, heads: int) -> list[list[float]]:
    """An uneven profile, in which some head may get nothing but the base."""
    return [[((7 * layer + 3 * head + 1) % 5) ** 1.5 for head in range(heads)] for layer in range(layers)]


def layer_weights(layers: int) -> torch.Tensor:
    return torch.tensor([((5 * layer + 2) % 7) ** 1.5 for layer in range(layers)], dtype=torch.float64)


def allocation_for(name: str, layers: int, heads: int) -> Allocation:
    return Profile(torch.tensor(head_shares(layers, heads))) if name == "profile" else get_allocation(name)


def keep(name: str, scores: torch.Tensor, total: int, protected: torch.Tensor) -> torch.Tensor:
    """``Allocation.keep`` with what the allocation needs besides the scores."""
    layers, heads, _ = scores.shape
    weights = layer_weights(layers).to(scores.device)
    return allocation_for(name, layers, heads).keep(scores, total, protected, weights)


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
    output = torch.randn(heads, group, size, HIDDEN, generator=generator)
    return LayerView(attention, values, projection, visible, output=output)
