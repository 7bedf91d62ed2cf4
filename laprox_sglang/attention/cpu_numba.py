"""Ragged attention for decode and short extends on a CPU: compiled code that reads the KV rows where they lie.

Every (request, kv head) list is cut into pieces, and every thread takes an equal share of them, so that one long list
keeps all cores busy; the pieces of a list are merged by their log-sum-exp. Numbers are widened to
float32 in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from laprox_sglang.attention.base import RaggedAttention, RaggedBatch
from laprox_sglang.attention.torch_reference import TorchRaggedAttention
from laprox_sglang.jit.numerics import FAST, NUMPY_TYPE, cached_jit, cap_logit, exp_negative, narrow, widen
from laprox_sglang.jit.openmp import c_function, call, fork, kernel, pointer, team, words_at

BLOCK = 128  # rows for which logits are formed at a time
# Rows after which every list is cut, whatever else is in the batch and however many threads there are: so a request's
# result does not depend on either, to the last bit.
PIECE = 256
LANE = 8  # head_dim must be a multiple
# Below this many multiply-adds (25 us on one core) a second thread does not pay.
PARALLEL_FROM = 100_000


@cached_jit(nogil=True, error_model="numpy")
def plan(threads, skip, layer, heads, arrays):  # type: ignore[no-untyped-def]
    """Cut the lists into pieces [P, 4] (request, head, low, high), in order, and give thread t the pieces
    [share[t], share[t + 1]), about the same number of (row, query) pairs to each. Requests that ``skip`` [B] marks get
    none. Also returns the most new tokens."""
    _, indptr, _, _, tail_start, seq_len, q_start = arrays
    requests = len(tail_start)
    cost, most = 0, 0
    for b in range(requests):
        new = q_start[b + 1] - q_start[b]
        if skip[b]:
            continue
        most = max(most, new)
        listed = indptr[b, (layer + 1) * heads] - indptr[b, layer * heads]
        cost += new * (listed + heads * (seq_len[b] - tail_start[b]))
    pieces = np.empty((requests * heads + cost // PIECE + 1, 4), np.int64)
    share = np.zeros(threads + 1, np.int64)
    count, thread, done = 0, 0, 0
    for b in range(requests):
        new = q_start[b + 1] - q_start[b]
        if skip[b]:
            continue
        for h in range(heads):
            at = layer * heads + h
            length = indptr[b, at + 1] - indptr[b, at] + seq_len[b] - tail_start[b]
            for low in range(0, length, PIECE):
                high = min(length, low + PIECE)
                middle = 2 * done + (high - low) * new
                while thread < threads - 1 and middle * threads > 2 * cost * (thread + 1):
                    thread += 1
                    share[thread] = count
                pieces[count] = (b, h, low, high)
                done += (high - low) * new
                count += 1
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
            scaled = top[first:end, j]
            divisor = np.float32(0.0)
            for p in range(first, end):
                scaled[p - first] = np.exp(scaled[p - first] - highest)
                divisor += scaled[p - first] * total[p, j]
            for d in range(len(result)):
                x = np.float32(0.0)
                for p in range(first, end):
                    x += scaled[p - first] * acc[p, j, d]
                result[d] = narrow(result[d], x / divisor)
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
def run_piece(  # type: ignore[no-untyped-def]
    piece, lanes, q, k, v, layer, heads, group, arrays, scale, cap, top, total, acc
):
    """One piece for all queries of its request: fills top, total [M] and acc [M, D]."""
    b, h, low, high = piece
    rows, indptr, slots, pool_index, tail_start, seq_len, q_start = arrays
    head_dim = LANE * len(lanes)
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


# What Python hands to a kernel: addresses, sizes, and what plan() found, one int64 word each.
ROWS, INDPTR, SLOTS, POOL_INDEX, TAIL_START, SEQ_LEN, Q_START = range(7)
LISTED, REQUESTS, LISTS, HEADS, TABLE_ROWS, TABLE_WIDTH = range(7, 13)
K, V, POOL_ROWS, Q, Q_STRIDE, GROUP, TOKENS, OUT = range(13, 21)
LAYER, SKIP, REALS, THREADS, PARALLEL, NUMBER, SIZE, WORK = range(21, 29)
PIECES, SHARE, TOP, TOTAL, ACC, COUNT, MOST, WORDS = range(29, 37)


@cached_jit(nogil=True, error_model="numpy")
def batch_arrays(w):  # type: ignore[no-untyped-def]
    """rows, indptr, slots, pool_index, tail_start, seq_len, q_start of the words."""
    requests = w[REQUESTS]
    return (
        carray(pointer(w[ROWS]), w[LISTED], np.int32),
        carray(pointer(w[INDPTR]), (requests, w[LISTS] + 1), np.int64),
        carray(pointer(w[SLOTS]), (w[TABLE_ROWS], w[TABLE_WIDTH]), np.int32),
        carray(pointer(w[POOL_INDEX]), requests, np.int64),
        carray(pointer(w[TAIL_START]), requests, np.int64),
        carray(pointer(w[SEQ_LEN]), requests, np.int64),
        carray(pointer(w[Q_START]), requests + 1, np.int64),
    )


@functools.cache
def attend_kernel(pool_type: Any, out_type: Any, head_dim: int) -> tuple[Any, Callable[[Any], None]]:
    """Fills out [T, Hq, D] of the words. ``lanes`` is a tuple of D / LANE numbers: its length is part of its type, so
    D is a constant to the compiler."""
    lanes = (0,) * (head_dim // LANE)

    @cached_jit(nogil=True, error_model="numpy")
    def run_share(w, thread):  # type: ignore[no-untyped-def]
        arrays = batch_arrays(w)
        size, heads, group = LANE * len(lanes), w[HEADS], w[GROUP]
        pool = (w[POOL_ROWS], size)
        k, v = carray(pointer(w[K]), pool, pool_type), carray(pointer(w[V]), pool, pool_type)
        q = carray(pointer(w[Q]), (w[TOKENS], w[Q_STRIDE] // size, size), pool_type)
        reals = carray(pointer(w[REALS]), 2, np.float32)
        pieces = carray(pointer(w[PIECES]), (w[COUNT], 4), np.int64)
        share = carray(pointer(w[SHARE]), w[THREADS] + 1, np.int64)
        queries = (w[COUNT], w[MOST] * group)
        top, total = carray(pointer(w[TOP]), queries, np.float32), carray(pointer(w[TOTAL]), queries, np.float32)
        acc = carray(pointer(w[ACC]), (w[COUNT], w[MOST] * group, size), np.float32)
        for p in range(share[thread], share[thread + 1]):
            b = pieces[p, 0]
            m = (arrays[6][b + 1] - arrays[6][b]) * group
            piece = (b, pieces[p, 1], pieces[p, 2], pieces[p, 3])
            parts = top[p, :m], total[p, :m], acc[p, :m]
            run_piece(piece, lanes, q, k, v, w[LAYER], heads, group, arrays, reals[0], reals[1], *parts)

    @kernel()
    def work(data):  # type: ignore[no-untyped-def]
        w = carray(data, WORDS)
        for thread in range(call(w[NUMBER]), w[THREADS], call(w[SIZE])):
            run_share(w, thread)

    @kernel()
    def attend(data):  # type: ignore[no-untyped-def]
        w = carray(data, WORDS)
        arrays = batch_arrays(w)
        size, heads, group, threads = LANE * len(lanes), w[HEADS], w[GROUP], w[THREADS]
        skip = carray(pointer(w[SKIP]), w[REQUESTS], np.bool_)
        pieces, share, most = plan(threads, skip, w[LAYER], heads, arrays)
        top, total, acc = parts(len(pieces), most * group, size)
        w[PIECES], w[SHARE], w[COUNT], w[MOST] = pieces.ctypes.data, share.ctypes.data, len(pieces), most
        w[TOP], w[TOTAL], w[ACC] = top.ctypes.data, total.ctypes.data, acc.ctypes.data
        if w[PARALLEL] != 0 and threads > 1:
            fork(w[PARALLEL], w[WORK], data, threads)
        else:
            for thread in range(threads):
                run_share(w, thread)
        w[SHARE] = share[0]  # numba frees an array after its last use, and a word is none
        out = carray(pointer(w[OUT]), (w[TOKENS], heads * group, size), out_type)
        merge(pieces, group, arrays[6], top, total, acc, out)

    return work, c_function(attend)


class NumbaRaggedAttention(RaggedAttention):
    """For CPU tensors in float32, bfloat16 or float16, head_dim a multiple of 8. Requests whose ``work`` is above
    ``most_work`` are passed over; their part of the output stays as it is."""

    name = "numba"

    def __init__(self, most_work: int = 1 << 62) -> None:
        self.most_work = most_work
        self._skip = np.zeros(0, dtype=np.bool_)
        self._reference = TorchRaggedAttention()
        self._batch: RaggedBatch | None = None
        self._words = np.zeros(WORDS, dtype=np.int64)
        self._at = words_at(self._words)
        self._reals = np.zeros(2, dtype=np.float32)
        self._work = np.zeros(0, dtype=np.int64)
        self._threads = 1

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
        head_dim = q.shape[2]
        if batch is not self._batch:  # all layers of a step come with the same one
            self._check(k_rows, v_rows, head_dim)
            self._take(batch, k_rows, v_rows)
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        # Tokens may lie apart, as in a slice of fused QKV; heads may not.
        if q.dtype != k_rows.dtype or q.stride(2) != 1 or q.stride(1) != head_dim or q.stride(0) % head_dim:
            q = q.to(k_rows.dtype).contiguous()
        writable = out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous()
        result = out if writable else torch.empty(q.shape)
        work, attend = attend_kernel(NUMPY_TYPE[k_rows.dtype], NUMPY_TYPE[result.dtype], head_dim)
        words, group = self._words, q.shape[1] // batch.num_kv_heads
        words[Q], words[Q_STRIDE], words[TOKENS], words[GROUP] = q.data_ptr(), q.stride(0), q.shape[0], group
        words[OUT], words[LAYER], words[WORK] = result.data_ptr(), layer, work.address
        words[THREADS] = self._threads if self._work[layer] * group * head_dim >= PARALLEL_FROM else 1
        self._reals[0], self._reals[1] = scale, logit_cap
        attend(self._at)
        if result is not out:
            out.copy_(result)
        return out

    def _take(self, batch: RaggedBatch, k_rows: Tensor, v_rows: Tensor) -> None:
        """The words of all layers of this batch."""
        words, heads = self._words, batch.num_kv_heads
        host = (batch.indptr_host, batch.tail_start_host, batch.seq_len_host, batch.q_start_host)
        words[[INDPTR, TAIL_START, SEQ_LEN, Q_START]] = [array.ctypes.data for array in host]
        tensors = (batch.rows, batch.slots, batch.pool_index, k_rows, v_rows)
        words[[ROWS, SLOTS, POOL_INDEX, K, V]] = [tensor.data_ptr() for tensor in tensors]
        words[[LISTED, REQUESTS, LISTS, HEADS]] = [len(batch.rows), batch.size, batch.indptr.shape[1] - 1, heads]
        words[[TABLE_ROWS, TABLE_WIDTH]] = batch.slots.shape
        self._skip = batch.row_work > self.most_work
        words[[POOL_ROWS, SKIP]] = [k_rows.shape[0], self._skip.ctypes.data]
        runtime = team()
        words[[PARALLEL, NUMBER, SIZE]] = [runtime.parallel, runtime.number, runtime.size]
        words[REALS] = self._reals.ctypes.data
        listed = np.diff(batch.indptr_host[:, ::heads], axis=1)
        q_len = np.where(self._skip, 0, batch.q_len_host)
        # [L], (row, query) pairs
        self._work = q_len @ (listed + heads * (batch.seq_len_host - batch.tail_start_host)[:, None])
        self._threads = team().threads
        self._batch = batch  # also keeps alive what the words point to

    @staticmethod
    def _check(k_rows: Tensor, v_rows: Tensor, head_dim: int) -> None:
        if head_dim % LANE or not (k_rows.is_contiguous() and v_rows.is_contiguous()):
            raise ValueError(
                f"the numba CPU attention needs a contiguous pool and a head_dim that is a multiple of {LANE}, not "
                f"{head_dim}; use the 'torch' ragged attention for this model"
            )

    def lse_of_lists(
        self, q: Tensor, k_rows: Tensor, layer: int, batch: RaggedBatch, scale: float, logit_cap: float = 0.0
    ) -> Tensor:
        # Many queries for each row: one matmul over gathered rows is faster than walking them.
        return self._reference.lse_of_lists(q, k_rows, layer, batch, scale, logit_cap)

    def warm_up(self, dtype: torch.dtype, head_dim: int, group: int) -> None:
        pool = torch.zeros(1, head_dim, dtype=dtype)
        batch = RaggedBatch.build(
            rows=torch.zeros(1, dtype=torch.int32),
            indptr=np.array([[0, 1]]),
            slots=torch.zeros(1, 1, dtype=torch.int32),
            pool_index=[0],
            tail_start=[0],
            seq_len=[1],
            q_len=[1],
            num_kv_heads=1,
        )
        self.forward(torch.zeros(1, group, head_dim, dtype=dtype), pool, pool, 0, batch, 1.0)
