"""Layer normalisation of scores, which makes layers comparable before they compete for one budget."""

from __future__ import annotations

import torch
from torch import Tensor

# An infinite score would turn its whole layer into NaN; this one takes the layer, and sums without overflow.
LARGEST = 1e30


def layer_normalise(scores: Tensor) -> Tensor:
    """``p[l, h, t] / sum over h, t of p[l, h, t]`` (arXiv 2605.07234, layer normalisation of scores).

    scores: [L, H, n] float32, at least 0; the n tokens include the window's, where those are scored. NaN and
    negative numbers count as 0.
    Returns [L, H, n] float32; a layer of zeros stays zero.
    """
    scores = torch.nan_to_num(scores, nan=0.0).clamp(0, LARGEST)
    totals = scores.sum(dim=(1, 2), keepdim=True)
    return scores / totals.masked_fill(totals == 0, 1.0)
