"""The two factors of a score on a CPU, each in one pass over memory: column squares of attention, norms of V F.

The same numbers as ``policy.scores.parts`` makes from whole tensors (tests/attention/test_cpu_scores.py).
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor

from laprox_sglang.attention.cpu_numba import FAST, LAUNCH, cached_jit, exp_negative, numpy_view, widen


def column_squares(logits: Tensor, others: Tensor | None, first: int) -> Tensor:
    """Sum over the window of squared attention, softmax included; the attention itself is never written.

    Args:
        logits: ``[H, G, W, n]`` float32, contiguous, overwritten; -inf where a query cannot see a token.
        others: ``[H, G, W]`` float32 log-sum-exp over keys that are not among the n, or None.
        first: columns before it take part in the softmax only.
    Returns: ``[H, G, n - first]`` float32.
    """
    heads, group, window, tokens = logits.shape
    if others is None:
        others = torch.full((heads, group, window), float("-inf"))
    result = torch.zeros((heads, group, tokens - first))
    with LAUNCH:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        _column_squares(
            logits.view(heads * group, window, tokens).numpy(),
            logits.amax(-1).view(heads * group, window).numpy(),
            others.contiguous().view(heads * group, window).numpy(),
            first,
            result.view(heads * group, tokens - first).numpy(),
        )
    return result


def projected_norms(values: Tensor, factors: Tensor) -> Tensor:
    """``||v F||_2`` of every query head.

    Args:
        values: ``[n, H, D]`` float32, bfloat16 or float16.
        factors: ``[H, D, G * D]`` in the same dtype: each query head's factor, side by side.
    Returns: ``[H, G, n]`` float32.
    """
    heads, size, width = factors.shape
    projected = torch.bmm(values.transpose(0, 1), factors)
    result = torch.empty((heads, width // size, values.shape[0]))
    with LAUNCH:
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        _block_norms(numpy_view(projected), size, result.numpy())
    return result


def warm_up(dtype: torch.dtype, size: int) -> None:
    """Compile both for a pool of this dtype."""
    column_squares(torch.zeros(1, 1, 1, 8), None, 0)
    projected_norms(torch.zeros(1, 1, size, dtype=dtype), torch.zeros(1, size, size, dtype=dtype))


# The loops over one row stand alone: inside a prange body LLVM does not turn them into vector code.
@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _exponentials(row, most):  # type: ignore[no-untyped-def]
    """In place; returns their sum."""
    total = np.float32(0)
    for token in range(row.shape[0]):
        value = exp_negative(row[token] - most)
        row[token] = value
        total += value
    return total


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _add_squares(row, scale, sums):  # type: ignore[no-untyped-def]
    for token in range(sums.shape[0]):
        share = row[token] * scale
        sums[token] += share * share


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _norms(rows, size, result):  # type: ignore[no-untyped-def]
    for block in range(result.shape[0]):
        for token in range(rows.shape[0]):
            total = np.float32(0)
            row = rows[token, block * size : (block + 1) * size]
            for lane in range(row.shape[0]):
                x = widen(row[lane])
                total += x * x
            result[block, token] = np.sqrt(total)


@cached_jit(parallel=True, fastmath=FAST, nogil=True, error_model="numpy")
def _column_squares(logits, most, others, first, result):  # type: ignore[no-untyped-def]
    for head in numba.prange(logits.shape[0]):
        for query in range(logits.shape[1]):
            row = logits[head, query]
            top = most[head, query]
            other = others[head, query]
            # Relative to the larger of both, so that neither overflows.
            base = max(top, other)
            total = _exponentials(row, top) * np.exp(top - base)
            if other > -np.inf:
                total += np.exp(other - base)
            _add_squares(row[first:], np.float32(np.exp(top - base) / total), result[head])


@cached_jit(parallel=True, fastmath=FAST, nogil=True, error_model="numpy")
def _block_norms(projected, size, result):  # type: ignore[no-untyped-def]
    heads, tokens, _ = projected.shape
    for part in numba.prange(heads * 8):
        head, low, high = part // 8, tokens * (part % 8) // 8, tokens * (part % 8 + 1) // 8
        _norms(projected[head, low:high], size, result[head, :, low:high])
