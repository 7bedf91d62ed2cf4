"""The two factors of a score on a CPU, each in one pass over memory: column squares of attention, norms of V F.

The same numbers as ``policy.scores.parts`` makes from whole tensors (tests/attention/test_cpu_scores.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from laprox_sglang.jit.numerics import FAST, NUMPY_TYPE, cached_jit, exp_negative, highest, widen
from laprox_sglang.jit.openmp import c_function, call, fork, kernel, pointer, team, words_at

LANE = 8  # head_dim must be a multiple


class FusedFactors:
    """Both factors of all layers of one stretch, with buffers that are used again.

    Args:
        dtype: of the pool.
        shape: (H, G, n, D); D a multiple of 8.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, int, int, int]):
        heads, group, tokens, size = shape
        # bfloat16 logits of a bfloat16 pool: their rounding (2**-9 of a logit) is of the size of what the keys' own
        # rounding has done to them, and the product takes a fifth of the time.
        self.logits_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        self._values = torch.empty((heads, tokens, size), dtype=dtype)
        self._projected = torch.empty((heads, tokens, group * size), dtype=dtype)

    def column_squares(self, logits: Tensor, others: Tensor | None, first: int) -> Tensor:
        """Sum over the window of squared attention, softmax included; the attention itself is never written.

        Args:
            logits: ``[H, G, W, first + n]`` of ``logits_dtype``, contiguous; -inf where a query cannot see a token.
            others: ``[H, G, W]`` float32 log-sum-exp over keys that are not among the n, or None.
            first: columns before it take part in the softmax only.
        Returns: ``[H, G, n]`` float32.
        """
        heads, group, window, tokens = logits.shape
        if others is None:
            others = torch.full((heads, group, window), float("-inf"))
        result = torch.zeros((heads, group, tokens - first))
        # A head that two threads share is summed apart by the second.
        shared = torch.zeros((team().threads, tokens - first))
        compiled = _squares_kernel(NUMPY_TYPE[logits.dtype])
        _run(compiled, (logits, others.contiguous(), result, shared), (heads * group, window, tokens, first))
        return result

    def norms(self, values: Tensor, factors: Tensor) -> Tensor:
        """``||v F||_2`` of every query head.

        Args:
            values: ``[n, H, D]`` in the pool's dtype.
            factors: ``[H, D, G * D]`` in the same dtype: each query head's factor, side by side.
        Returns: ``[H, G, n]`` float32.
        """
        heads, size, width = factors.shape
        # The product of strided bfloat16 matrices takes three times as long as copying them first.
        self._values.copy_(values.transpose(0, 1))
        torch.bmm(self._values, factors, out=self._projected)
        result = torch.empty((heads, width // size, values.shape[0]))
        _run(_norms_kernel(NUMPY_TYPE[values.dtype], size), (self._projected, result), result.shape)
        return result


def warm_up(dtype: torch.dtype, size: int) -> None:
    """Compile both for a pool of this dtype."""
    factors = FusedFactors(dtype, (1, 1, 1, size))
    factors.column_squares(torch.zeros(1, 1, 1, 1, dtype=factors.logits_dtype), None, 0)
    factors.norms(torch.zeros(1, 1, size, dtype=dtype), torch.zeros(1, size, size, dtype=dtype))


def _run(compiled: tuple[Any, Callable], tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> None:
    work, start = compiled
    header = [team().parallel, team().number, team().size, work.address, team().threads]
    words = np.array([*header, *(tensor.data_ptr() for tensor in tensors), *sizes], dtype=np.int64)
    start(words_at(words))


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _exponentials(row, most, result):  # type: ignore[no-untyped-def]
    """Into result [n]; returns their sum."""
    total = np.float32(0)
    for token in range(row.shape[0]):
        value = exp_negative(widen(row[token]) - most)
        result[token] = value
        total += value
    return total


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _add_squares(row, scale, sums):  # type: ignore[no-untyped-def]
    for token in range(sums.shape[0]):
        share = row[token] * scale
        sums[token] += share * share


@cached_jit(nogil=True, error_model="numpy")
def _add(addend, sums):  # type: ignore[no-untyped-def]
    for token in range(sums.shape[0]):
        sums[token] += addend[token]


@functools.cache
def _squares_kernel(logits_type: Any) -> tuple[Any, Callable]:
    @cached_jit(nogil=True, error_model="numpy")
    def share(w, thread):  # type: ignore[no-untyped-def]
        threads, heads, window, tokens, first = w[4], w[9], w[10], w[11], w[12]
        logits = carray(pointer(w[5]), (heads * window, tokens), logits_type)
        others = carray(pointer(w[6]), heads * window, np.float32)
        result = carray(pointer(w[7]), (heads, tokens - first), np.float32)
        shared = carray(pointer(w[8]), (threads, tokens - first), np.float32)
        weights = np.empty(tokens, np.float32)
        low, high = heads * window * thread // threads, heads * window * (thread + 1) // threads
        for index in range(low, high):
            row = logits[index]
            top = highest(row)
            if top == -np.inf:
                continue
            other = others[index]
            # Relative to the larger of both, so that neither overflows.
            base = max(top, other)
            total = _exponentials(row, top, weights) * np.exp(top - base)
            if other > -np.inf:
                total += np.exp(other - base)
            scale = np.float32(np.exp(top - base) / total)
            head = index // window
            sums = result[head] if head * window >= low else shared[thread]
            _add_squares(weights[first:], scale, sums)

    @kernel()
    def work(data):  # type: ignore[no-untyped-def]
        w = carray(data, 13)
        for thread in range(call(w[1]), w[4], call(w[2])):
            share(w, thread)

    @kernel()
    def squares(data):  # type: ignore[no-untyped-def]
        w = carray(data, 13)
        threads, heads, window, columns = w[4], w[9], w[10], w[11] - w[12]
        if threads > 1:
            fork(w[0], w[3], data, threads)
        else:
            share(w, 0)
        result = carray(pointer(w[7]), (heads, columns), np.float32)
        shared = carray(pointer(w[8]), (threads, columns), np.float32)
        for thread in range(threads):
            low = heads * window * thread // threads
            if low % window:
                _add(shared[thread], result[low // window])

    return work, c_function(squares)


@functools.cache
def _norms_kernel(value_type: Any, size: int) -> tuple[Any, Callable]:
    lanes = (0,) * (size // LANE)  # its length is part of its type, so the head size is a constant to the compiler

    @cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
    def norm(row):  # type: ignore[no-untyped-def]
        total = np.float32(0)
        for lane in range(LANE * len(lanes)):
            x = widen(row[lane])
            total += x * x
        return np.sqrt(total)

    @cached_jit(nogil=True, error_model="numpy")
    def share(w, thread):  # type: ignore[no-untyped-def]
        threads, heads, group, tokens = w[4], w[7], w[8], w[9]
        projected = carray(pointer(w[5]), (heads, tokens, group, LANE * len(lanes)), value_type)
        result = carray(pointer(w[6]), (heads, group, tokens), np.float32)
        for head in range(heads):
            for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
                for query_head in range(group):
                    result[head, query_head, token] = norm(projected[head, token, query_head])

    @kernel()
    def work(data):  # type: ignore[no-untyped-def]
        w = carray(data, 10)
        for thread in range(call(w[1]), w[4], call(w[2])):
            share(w, thread)

    @kernel()
    def norms(data):  # type: ignore[no-untyped-def]
        w = carray(data, 10)
        if w[4] > 1:
            fork(w[0], w[3], data, w[4])
        else:
            share(w, 0)

    return work, c_function(norms)
