"""Ragged attention for decode and short extends on a CPU: numba code that reads the KV rows where they lie.

Every thread takes an equal share of the rows of all (request, kv head) lists, cut where the share ends, so that one
long list keeps all cores busy; the parts of a cut list are merged by their log-sum-exp. Numbers are widened to
float32 in registers: bfloat16 and float16 pools come in as 16-bit integers, which numba can load as vectors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.attention.torch_reference import TorchRaggedAttention

logger = logging.getLogger(__name__)

# Its idle threads sleep; those of the OpenMP layer spin, in a second runtime beside torch's own. On 2 cores shared with
# another process a call between matmuls took 0.4 to 1 ms with this layer and 10 to 18 ms with OpenMP (medians).
# It is not thread-safe: LAUNCH guards it.
numba.config.THREADING_LAYER = "workqueue"
LAUNCH = threading.Lock()

# Not nnan and ninf: -inf is a logit here, and a NaN in a pool must reach the output.
FAST = {"reassoc", "contract", "nsz", "arcp"}
BLOCK = 128  # rows for which logits are formed at a time
LANE = 8  # head_dim must be a multiple
# Below this many multiply-adds (250 us on one core) waking other threads, 50 to 150 us, does not pay.
PARALLEL_FROM = 1_000_000
# bfloat16 and float16 need two integer types for numba to tell them apart.
NUMPY_VIEW = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@intrinsic
def widen(context, value):  # type: ignore[no-untyped-def]
    """float32 of a float32, of bfloat16 bits (uint16), or of float16 bits (int16)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        (x,) = arguments
        word, real = ir.IntType(32), ir.FloatType()
        if value == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(x, word), word(16)), real)
        if value == types.int16:
            # Exponent and mantissa moved into place are 2**-112 of the number; subnormals come out right too.
            bits = builder.zext(x, word)
            magnitude = builder.shl(builder.and_(bits, word(0x7FFF)), word(13))
            scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, real), real(2.0**112)), word)
            special = builder.icmp_unsigned(">=", magnitude, word(0x0F800000))
            scaled = builder.select(special, builder.or_(magnitude, word(0x7F800000)), scaled)
            return builder.bitcast(builder.or_(scaled, builder.shl(builder.and_(bits, word(0x8000)), word(16))), real)
        return x

    return types.float32(value), generate


@intrinsic
def bits_as_float(context, bits):  # type: ignore[no-untyped-def]
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@numba.njit(fastmath=FAST, inline="always")
def exp_negative(x):  # type: ignore[no-untyped-def]
    """exp of x <= 0 to 2e-7, in operations that become vector code; below 2**-126 it stays there."""
    x = x * np.float32(1.4426950408889634)
    x = np.float32(-126.0) if x < np.float32(-126.0) else x  # written so that NaN passes
    whole = np.floor(x + np.float32(0.5))
    part = x - whole
    p = np.float32(1.5403530e-4)
    p = p * part + np.float32(1.3333558e-3)
    p = p * part + np.float32(9.6181291e-3)
    p = p * part + np.float32(5.5504109e-2)
    p = p * part + np.float32(2.4022651e-1)
    p = p * part + np.float32(6.9314718e-1)
    p = p * part + np.float32(1.0)
    return p * bits_as_float((np.int32(whole) + np.int32(127)) << np.int32(23))


@numba.njit(fastmath=FAST, inline="always")
def cap_logit(x, cap):  # type: ignore[no-untyped-def]
    """cap * tanh(x / cap)"""
    t = exp_negative(np.float32(-2.0) * abs(x) / cap)
    magnitude = cap * (np.float32(1.0) - t) / (np.float32(1.0) + t)
    return magnitude if x >= np.float32(0.0) else -magnitude


def cached_jit(**options: Any) -> Callable[[Callable], Callable]:
    """numba.njit with the compiled code kept on disk, or without where no cache folder can be written."""

    def decorate(function: Callable) -> Callable:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError as error:
            logger.warning("no numba cache (%s): the CPU kernels are compiled again at every start", error)
            return numba.njit(**options)(function)

    return decorate


@cached_jit(nogil=True, error_model="numpy")
def plan(threads, longest, layer, heads, arrays):  # type: ignore[no-untyped-def]
    """Cut the lists into pieces [P, 4] (request, head, low, high), in order, and give thread t the pieces
    [share[t], share[t + 1]), the same number of (row, query) pairs to each. Requests with more than ``longest`` new
    tokens get none. Also returns the most new tokens."""
    _, indptr, _, _, tail_start, seq_len, q_start = arrays
    requests = len(tail_start)
    cost, most = 0, 0
    for b in range(requests):
        new = q_start[b + 1] - q_start[b]
        if new > longest:
            continue
        most = max(most, new)
        listed = indptr[b, (layer + 1) * heads] - indptr[b, layer * heads]
        cost += new * (listed + heads * (seq_len[b] - tail_start[b]))
    pieces = np.empty((requests * heads + threads, 4), np.int64)
    share = np.zeros(threads + 1, np.int64)
    count, thread, done = 0, 0, 0
    for b in range(requests):
        new = q_start[b + 1] - q_start[b]
        if new > longest:
            continue
        for h in range(heads):
            at = layer * heads + h
            length = indptr[b, at + 1] - indptr[b, at] + seq_len[b] - tail_start[b]
            low = 0
            while low < length:
                # The last thread's bound is the whole cost, so that nothing is left over.
                bound = cost * (thread + 1) // threads
                high = min(length, low + max(1, (bound - done) // new))
                pieces[count] = (b, h, low, high)
                done += (high - low) * new
                low = high
                count += 1
                while thread < threads - 1 and done + new > bound:
                    thread += 1
                    share[thread] = count
                    bound = cost * (thread + 1) // threads
    share[thread + 1 :] = count
    return pieces[:count], share, most


@cached_jit(nogil=True)
def parts(pieces, queries, head_dim):  # type: ignore[no-untyped-def]
    """Memory for the highest logit, the sum of weights and the weighted sum of values of every piece."""
    shape = (pieces, queries)
    return np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty((pieces, queries, head_dim), np.float32)


@cached_jit(nogil=True, error_model="numpy")
def merge(pieces, group, q_start, top, total, acc, out):  # type: ignore[no-untyped-def]
    """out [T, Hq, D] of the pieces' top, total [P, M] and acc [P, M, D]; the pieces of one list are neighbours."""
    first = 0
    while first < len(pieces):
        b, h = pieces[first, 0], pieces[first, 1]
        end = first + 1
        while end < len(pieces) and pieces[end, 2] > 0:
            end += 1
        for j in range((q_start[b + 1] - q_start[b]) * group):
            result = out[q_start[b] + j // group, h * group + j % group]
            highest = top[first:end, j].max()
            divisor = np.float32(0.0)
            result[:] = np.float32(0.0)
            for p in range(first, end):
                weight = np.exp(top[p, j] - highest)
                divisor += weight * total[p, j]
                for d in range(len(result)):
                    result[d] += weight * acc[p, j, d]
            for d in range(len(result)):
                result[d] /= divisor
        first = end


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def block(lanes, q, k, v, index, first, limit, cap, logits, wide, top, total, acc):  # type: ignore[no-untyped-def]
    """Online softmax of queries q [M, D] over one block of rows; query j sees the rows before limit[j]."""
    queries, head_dim, n = q.shape[0], LANE * len(lanes), index.shape[0]
    for r in range(n):
        row = k[index[r]]
        for d in range(head_dim):
            wide[0, d] = widen(row[d])
        for j in range(queries):
            dot = np.float32(0.0)
            for d in range(head_dim):
                dot += q[j, d] * wide[0, d]
            logits[j, r] = dot
    for j in range(queries):
        seen = min(n, limit[j] - first)
        if cap > np.float32(0.0):
            for r in range(seen):
                logits[j, r] = cap_logit(logits[j, r], cap)
        highest = top[j]
        for r in range(seen):
            highest = logits[j, r] if logits[j, r] > highest else highest
        added = np.float32(0.0)
        for r in range(seen):
            p = exp_negative(logits[j, r] - highest)
            logits[j, r] = p
            added += p
        for r in range(max(seen, 0), n):
            logits[j, r] = np.float32(0.0)
        if seen > 0:
            shrink = exp_negative(top[j] - highest)
            total[j] = total[j] * shrink + added
            top[j] = highest
            for d in range(head_dim):
                acc[j, d] *= shrink
    whole = n // 4 * 4
    for r in range(0, whole, 4):
        for i in range(4):
            row = v[index[r + i]]
            for d in range(head_dim):
                wide[i, d] = widen(row[d])
        for j in range(queries):
            p0, p1, p2, p3 = logits[j, r], logits[j, r + 1], logits[j, r + 2], logits[j, r + 3]
            for d in range(head_dim):
                acc[j, d] += p0 * wide[0, d] + p1 * wide[1, d] + p2 * wide[2, d] + p3 * wide[3, d]
    for r in range(whole, n):
        row = v[index[r]]
        for j in range(queries):
            for d in range(head_dim):
                acc[j, d] += logits[j, r] * widen(row[d])


@cached_jit(nogil=True, error_model="numpy")
def run_piece(piece, lanes, q, k, v, layer, heads, arrays, scale, cap, top, total, acc):  # type: ignore[no-untyped-def]
    """One piece for all queries of its request: fills top, total [M] and acc [M, D]."""
    b, h, low, high = piece
    rows, indptr, slots, pool_index, tail_start, seq_len, q_start = arrays
    group, head_dim = q.shape[1] // heads, LANE * len(lanes)
    stride = k.shape[0] // (indptr.shape[1] - 1)
    new = q_start[b + 1] - q_start[b]
    list_start = indptr[b, layer * heads + h]
    listed = indptr[b, layer * heads + h + 1] - list_start
    seen_by_first = listed + seq_len[b] - tail_start[b] - new + 1
    scaled = np.empty((new * group, head_dim), np.float32)
    limit = np.empty(new * group, np.int64)
    for t in range(new):
        for g in range(group):
            limit[t * group + g] = seen_by_first + t
            for d in range(head_dim):
                scaled[t * group + g, d] = widen(q[q_start[b] + t, h * group + g, d]) * scale
    logits = np.empty((new * group, BLOCK), np.float32)
    wide = np.empty((4, head_dim), np.float32)
    index = np.empty(BLOCK, np.int64)
    top[:] = -np.inf
    total[:] = 0.0
    acc[:] = 0.0
    for first in range(low, high, BLOCK):
        n = min(BLOCK, high - first)
        inside = min(max(listed - first, 0), n)
        for i in range(inside):
            index[i] = rows[list_start + first + i]
        for i in range(inside, n):
            slot = slots[pool_index[b], tail_start[b] + first + i - listed]
            index[i] = (layer * stride + slot) * heads + h
        block(lanes, scaled, k, v, index[:n], first, limit, cap, logits, wide, top, total, acc)


@cached_jit(nogil=True, error_model="numpy")
def run_share(pieces, lanes, q, k, v, layer, heads, arrays, scale, cap, top, total, acc):  # type: ignore[no-untyped-def]
    q_start, group = arrays[6], q.shape[1] // heads
    for p in range(len(pieces)):
        b, h, low, high = pieces[p]
        m = (q_start[b + 1] - q_start[b]) * group
        piece = (b, h, low, high)
        run_piece(piece, lanes, q, k, v, layer, heads, arrays, scale, cap, top[p, :m], total[p, :m], acc[p, :m])


# Two functions, not one compiled twice: numba's cache does not tell a parallel version from a serial one.
@cached_jit(nogil=True, error_model="numpy")
def attend(threads, longest, lanes, q, k, v, layer, heads, arrays, scale, cap, out):  # type: ignore[no-untyped-def]
    """Fill out [T, Hq, D] float32. ``lanes`` is a tuple of D / LANE numbers: its length is part of its type, so D is
    a constant to the compiler. ``arrays``: rows, indptr, slots, pool_index, tail_start, seq_len, q_start."""
    group = q.shape[1] // heads
    pieces, share, most = plan(threads, longest, layer, heads, arrays)
    top, total, acc = parts(len(pieces), most * group, q.shape[2])
    for thread in range(threads):
        mine = slice(share[thread], share[thread + 1])
        run_share(pieces[mine], lanes, q, k, v, layer, heads, arrays, scale, cap, top[mine], total[mine], acc[mine])
    merge(pieces, group, arrays[6], top, total, acc, out)


@cached_jit(nogil=True, parallel=True, error_model="numpy")
def attend_parallel(threads, longest, lanes, q, k, v, layer, heads, arrays, scale, cap, out):  # type: ignore[no-untyped-def]
    group = q.shape[1] // heads
    pieces, share, most = plan(threads, longest, layer, heads, arrays)
    top, total, acc = parts(len(pieces), most * group, q.shape[2])
    for thread in numba.prange(threads):
        mine = slice(share[thread], share[thread + 1])
        run_share(pieces[mine], lanes, q, k, v, layer, heads, arrays, scale, cap, top[mine], total[mine], acc[mine])
    merge(pieces, group, arrays[6], top, total, acc, out)


class NumbaRaggedAttention(RaggedAttention):
    """For CPU tensors in float32, bfloat16 or float16, head_dim a multiple of 8. Requests with more than ``longest``
    new tokens are passed over; their part of the output is undefined."""

    name = "numba"

    def __init__(self, longest: int = 1 << 30) -> None:
        self.longest = longest
        self._reference = TorchRaggedAttention()
        self._batch: RaggedBatch | None = None
        self._arrays: tuple[np.ndarray, ...] = ()

    def forward(
        self,
        q: Tensor,
        k_rows: Tensor,
        v_rows: Tensor,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        logit_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        if q.shape[2] % LANE or not (k_rows.is_contiguous() and v_rows.is_contiguous()):
            raise ValueError(
                f"the numba CPU attention needs a contiguous pool and a head_dim that is a multiple of {LANE}, not "
                f"{q.shape[2]}; use the 'torch' ragged attention for this model"
            )
        out = torch.empty_like(q) if out is None else out
        if batch is not self._batch:  # all layers of a step come with the same one
            host = (batch.tail_start_host, batch.seq_len_host, batch.q_start_host)
            self._arrays = (batch.rows.numpy(), batch.indptr_host, batch.slots.numpy(), batch.pool_index.numpy(), *host)
            self._batch = batch
        heads = batch.num_kv_heads
        at = layer * heads
        lengths = batch.indptr_host[:, at + heads] - batch.indptr_host[:, at]
        lengths = lengths + heads * (batch.seq_len_host - batch.tail_start_host)
        q_len = batch.q_len_host
        work = int(lengths @ np.where(q_len > self.longest, 0, q_len)) * (q.shape[1] // heads) * q.shape[2]
        threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS) if work >= PARALLEL_FROM else 1
        result = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty(q.shape)
        pools = numpy_view(k_rows), numpy_view(v_rows)
        lanes = (0,) * (q.shape[2] // LANE)
        cap = np.float32(logit_cap)
        inputs = (self.longest, lanes, numpy_view(q.contiguous()), *pools, layer, heads, self._arrays)
        arguments = (threads, *inputs, np.float32(scale), cap, result.numpy())
        if threads == 1:
            attend(*arguments)
        else:
            with LAUNCH:
                numba.set_num_threads(threads)
                attend_parallel(*arguments)
        if result is not out:
            out.copy_(result)
        return out

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        # Many queries for each row: one matmul over gathered rows is faster than walking them.
        return self._reference.lse_of_lists(q, k_rows, layer, batch, scale, logit_cap)

    def warm_up(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        rows = torch.zeros(PARALLEL_FROM // head_dim + 1, dtype=torch.int32)
        pool = torch.zeros(1, head_dim, dtype=dtype)
        for length in (1, len(rows)):  # the serial and the parallel kernel
            batch = RaggedBatch.build(
                rows=rows,
                indptr=np.array([[0, length]]),
                slots=torch.zeros(1, 1, dtype=torch.int32),
                pool_index=[0],
                tail_start=[0],
                seq_len=[1],
                q_len=[1],
                num_kv_heads=1,
            )
            self.forward(torch.zeros(1, group, head_dim, dtype=dtype), pool, pool, 0, batch, 1.0)


def numpy_view(tensor: Tensor) -> np.ndarray:
    return tensor.view(NUMPY_VIEW[tensor.dtype]).numpy()
