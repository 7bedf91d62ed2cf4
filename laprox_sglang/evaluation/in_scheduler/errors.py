"""How far each layer's attention output moves when entries are dropped, everything before it held fixed."""

from __future__ import annotations

import torch
from torch import Tensor

from laprox_sglang.cache.rows import RowPool
from laprox_sglang.policy.select import Selection

# Queries of the continuation that are looked at, spread evenly over it.
QUERIES = 32


def attention_errors(
    pool: RowPool,
    slots: Tensor,
    queries: list[Tensor],
    output: Tensor,
    scales: list[float],
    caps: list[float],
    start: int,
    stretch: int,
    selections: list[Selection],
) -> list[list[float]]:
    """``||O' W_O - O W_O|| / ||O W_O||`` of every selection and layer, over queries of the tokens from ``start`` on.

    Args:
        slots: ``[n]``, the dense sequence's. queries: ``[n, Hq, D]`` of each layer. output: ``[L, H, G, D, hidden]``.
        stretch: tokens before it are kept as a selection says, the others all.
    O is the attention over everything, O' over what is kept; both come from the uncompressed model's queries, keys and
    values, so a layer's error does not contain that of the layers before it.
    """
    total = slots.shape[0]
    chosen = torch.linspace(start, total - 1, min(QUERIES, total - start)).long().unique().to(slots.device)
    hidden = torch.arange(total, device=slots.device) > chosen[:, None]
    masks = [_mask(selection, pool, stretch, total) for selection in selections]
    errors: list[list[float]] = [[] for _ in selections]
    for layer in range(pool.layers):
        keys = pool.k[layer].index_select(0, slots).float().transpose(0, 1)
        values = pool.v[layer].index_select(0, slots).float().transpose(0, 1)
        heads, count = pool.heads, chosen.shape[0]
        query = queries[layer].index_select(0, chosen).float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        logits = (query.flatten(1, 2) * scales[layer]) @ keys.transpose(1, 2)
        if caps[layer] > 0:
            logits = torch.tanh(logits / caps[layer]) * caps[layer]
        logits = logits.view(heads, -1, count, total).masked_fill(hidden, float("-inf")).flatten(1, 2)
        weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        # The last column sums the weights, so that one product gives both the sum and its normaliser.
        extended = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)
        matrix = output[layer].float().flatten(0, 2)
        exact = _projected(weights @ extended, heads, count, matrix)
        for found, mask in zip(errors, masks, strict=True):
            ours = _projected(weights @ (extended * mask[layer].unsqueeze(-1)), heads, count, matrix)
            found.append(float((ours - exact).norm() / exact.norm()))
    return errors


def _projected(sums: Tensor, heads: int, count: int, matrix: Tensor) -> Tensor:
    """[H, G * C, D + 1] weighted sums -> [C, hidden]."""
    attention = sums[..., :-1] / sums[..., -1:].clamp(min=1e-30)
    return attention.view(heads, -1, count, attention.shape[-1]).permute(2, 0, 1, 3).flatten(1) @ matrix


def _mask(selection: Selection, pool: RowPool, stretch: int, total: int) -> Tensor:
    """[L, H, n] float32: 1 where an entry is kept."""
    mask = torch.zeros((pool.rows_per_slot, total), device=selection.positions.device)
    mask[:, stretch:] = 1
    lists = torch.arange(pool.rows_per_slot, device=mask.device).repeat_interleave(selection.indptr.long().diff())
    mask[lists, selection.positions.long()] = 1
    return mask.view(pool.layers, pool.heads, total)
