"""Whole numbers in proportion to weights, none above a limit, their sum exact: what weighted budgets are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def proportional_shares(total: Tensor, weights: Tensor, room: Tensor) -> Tensor:
    """[M] int64 near ``total * weights / sum(weights)``, none above ``room``, their sum exactly ``total``.

    total: integer tensor, at most M * room. weights: [M] float, at least 0; NaN counts as 0, and where all are 0 they
    are taken as equal. room: integer tensor. What a full share cannot take goes to the others in proportion; what
    rounding leaves over goes to the largest remainders, first ones first. Nothing waits for the device.
    """
    count = weights.shape[0]
    weights = torch.nan_to_num(weights.double(), nan=0.0, posinf=1e300).clamp(min=0)
    weights = weights / weights.amax().clamp(min=1e-300)
    # Weights of (nearly) zero may have to take something when all others are full.
    weights = weights.clamp(min=1e-12)
    ordered, order = weights.sort(descending=True, stable=True)
    # With the k largest full, the others share what is left; the right k is the first at which none of them overflows.
    behind = ordered.flip(0).cumsum(0).flip(0)
    full = torch.arange(count, device=weights.device)
    scale = (total - full * room).clamp(min=0) / behind
    fits = scale * ordered <= room
    first = fits.int().argmax()
    # None fits only where everything is full.
    first = torch.where(fits.any(), first, torch.full_like(first, count))
    exact = torch.where(
        full < first, room.double(), scale.index_select(0, first.clamp(max=count - 1).view(1)) * ordered
    )
    whole = exact.floor().to(torch.int64)
    left = total - whole.sum()
    # A share that is full has no remainder; it must not be the one that is rounded up.
    remainder = (exact - whole).masked_fill(whole >= room, -1.0)
    shares = torch.zeros_like(whole).index_copy(0, order, whole)
    remainder = torch.zeros_like(remainder).index_copy(0, order, remainder)
    rank = remainder.argsort(descending=True, stable=True)
    return shares + torch.zeros_like(shares).index_copy(0, rank, (full < left).to(torch.int64))
