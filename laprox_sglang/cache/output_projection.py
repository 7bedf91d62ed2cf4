"""The Gram factors of W_O: ``||v W_O^i||^2 = v^T (W_O^i W_O^i^T) v = ||v F||^2`` with a D x D factor F.

So a value's contribution to the hidden state is measured without ever forming it (D / hidden of the cost).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def effective_weight(o_proj: Any, heads: int, head_dim: int, dtype: torch.dtype, device: object) -> Tensor:
    """W_O as the layer really applies it, ``[Hq, D, hidden]`` float32.

    The identity is fed through the layer's own quant method, so that quantised weights count as they act. A tensor
    parallel rank sees its own heads; there is no reduce and no bias.
    """
    width = heads * head_dim
    rows = []
    for head in range(heads):
        probe = torch.zeros((head_dim, width), dtype=dtype, device=torch.device(str(device)))
        probe[:, head * head_dim : (head + 1) * head_dim] = torch.eye(head_dim, dtype=dtype)
        rows.append(o_proj.quant_method.apply(o_proj, probe).float())
    return torch.stack(rows)


@torch.no_grad()
def gram_factors(weight: Tensor, kv_heads: int) -> Tensor:
    """``[Hq, D, hidden]`` -> ``[H, G, D, D]`` float32, F with ``F F^T = W W^T`` per query head.

    By eigendecomposition rather than Cholesky: a head's W_O may be singular.
    """
    heads, dim, _ = weight.shape
    gram = weight.double() @ weight.double().transpose(-1, -2)
    values, vectors = torch.linalg.eigh(gram)
    factor = vectors * values.clamp_min(0).sqrt()[:, None, :]
    return factor.float().view(kv_heads, heads // kv_heads, dim, dim)
