"""RMSNorm, SiLU-and-multiply and rotary embedding of SGLang's CPU path, each in one pass.

SGLang has such kernels in its own CPU build, which the wheel on PyPI is not; without it these layers run as 4 to 30
torch calls each, which on a small model cost as much as its matrix products. The numbers are those of SGLang's
``forward_native``: rounded where it rounds (sums may be taken in another order).

Installed only together with the CPU engine, for plain SGLang and for ours alike, so that neither is compared with a
slower engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from laprox_sglang.jit.numerics import FAST, NUMPY_TYPE, cached_jit, exp_negative, narrow, widen
from laprox_sglang.jit.openmp import c_function, call, fork, kernel, pointer, team, words_at

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
# Below this many numbers (20 us on one core) a second thread does not pay.
PARALLEL_FROM = 50_000
# Words of a kernel: where the runtime is, how many rows, then what the layer needs.
PARALLEL, NUMBER, SIZE, WORK, THREADS, TOKENS, BAD = range(7)
MOST_WORDS = 19


def install() -> list[str]:
    """Replace the three layers' ``forward_native``. Returns the names of those replaced."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    done = []
    for owner, make in ((RMSNorm, _norm_hook), (SiluAndMul, _silu_hook), (RotaryEmbedding, _rotary_hook)):
        original = owner.__dict__["forward_native"]
        if not hasattr(original, "__wrapped__"):
            owner.forward_native = functools.wraps(original)(make(original))
        done.append(owner.__name__)
    return done


def _usable(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in DTYPES and x.numel() > 0 and not torch.compiler.is_compiling()


def _run(compiled: tuple[Any, Callable], tokens: int, numbers: int, *words: int) -> None:
    work, start = compiled
    threads = team().threads if numbers >= PARALLEL_FROM else 1
    header = [team().parallel, team().number, team().size, work.address, threads, tokens, 0]
    array = np.array([*header, *words], dtype=np.int64)
    start(words_at(array))
    if array[BAD]:
        raise IndexError("a token lies after the last position that the model's rotary embedding has")


def _compiled(share: Callable) -> tuple[Any, Callable]:
    """Two kernels of ``share(words, first, last)``: one for each thread, and one that starts them."""

    @kernel()
    def work(data):  # type: ignore[no-untyped-def]
        w = carray(data, MOST_WORDS)
        threads, tokens = w[THREADS], w[TOKENS]
        for thread in range(call(w[NUMBER]), threads, call(w[SIZE])):
            share(w, tokens * thread // threads, tokens * (thread + 1) // threads)

    @kernel()
    def start(data):  # type: ignore[no-untyped-def]
        w = carray(data, MOST_WORDS)
        if w[THREADS] > 1:
            fork(w[PARALLEL], w[WORK], data, w[THREADS])
        else:
            share(w, 0, w[TOKENS])

    return work, c_function(start)


# RMSNorm


def _norm_hook(original: Callable) -> Callable:
    def forward(layer, x, residual=None, post_residual_addition=None, quant_linear=None):  # type: ignore[no-untyped-def]
        plain = (
            layer.variance_size_override is None
            and layer.override_orig_dtype is None
            and not layer.cast_x_before_out_mul
            and not layer.fp32_residual
            and post_residual_addition is None
            and x.shape[-1] == layer.hidden_size
            and layer.weight.dtype == x.dtype
            and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape))
        )
        if not plain or not _usable(x):
            return original(layer, x, residual, post_residual_addition, quant_linear)
        return rms_norm(x, residual, layer.weight.data, layer.variance_epsilon)

    return forward


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Tensor | tuple[Tensor, Tensor]:
    """x [..., n] and residual of one dtype (float32 or bfloat16): normalised (x + residual) * weight, and, where a
    residual is given, their sum in that dtype."""
    x = x.contiguous()
    out = torch.empty_like(x)
    added = residual is not None
    residual = x if residual is None else residual.contiguous()
    total = torch.empty_like(x) if added else out
    size = x.shape[-1]
    small = np.array([epsilon], dtype=np.float32)
    addresses = (tensor.data_ptr() for tensor in (x, residual, weight.contiguous(), total, out))
    kernels = _norm_kernel(NUMPY_TYPE[x.dtype])
    _run(kernels, x.numel() // size, x.numel(), *addresses, small.ctypes.data, size, int(added))
    return (out, total) if added else out


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _sum_and_squares(x, residual, added, wide, total):  # type: ignore[no-untyped-def]
    squares = np.float32(0)
    if added:
        for lane in range(x.shape[0]):
            value = widen(x[lane]) + widen(residual[lane])
            wide[lane] = value
            total[lane] = narrow(total[lane], value)
            squares += value * value
    else:
        for lane in range(x.shape[0]):
            value = widen(x[lane])
            wide[lane] = value
            squares += value * value
    return squares


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _scaled(wide, scale, weight, out):  # type: ignore[no-untyped-def]
    for lane in range(wide.shape[0]):
        out[lane] = narrow(out[lane], wide[lane] * scale * widen(weight[lane]))


@functools.cache
def _norm_kernel(dtype: Any) -> tuple[Any, Callable]:
    @cached_jit(nogil=True, error_model="numpy")
    def share(w, first, last):  # type: ignore[no-untyped-def]
        size, shape = w[13], (w[TOKENS], w[13])
        x, residual = carray(pointer(w[7]), shape, dtype), carray(pointer(w[8]), shape, dtype)
        weight, epsilon = carray(pointer(w[9]), size, dtype), carray(pointer(w[12]), 1, np.float32)
        total, out = carray(pointer(w[10]), shape, dtype), carray(pointer(w[11]), shape, dtype)
        wide = np.empty(size, np.float32)
        for token in range(first, last):
            squares = _sum_and_squares(x[token], residual[token], w[14] != 0, wide, total[token])
            scale = np.float32(1) / np.sqrt(squares / np.float32(size) + epsilon[0])
            _scaled(wide, scale, weight, out[token])

    return _compiled(share)


# SiLU and multiply


def _silu_hook(original: Callable) -> Callable:
    def forward(layer, x):  # type: ignore[no-untyped-def]
        return silu_and_mul(x) if _usable(x) and x.shape[-1] % 2 == 0 else original(layer, x)

    return forward


def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x[..., :n]) * x[..., n:]`` of x [..., 2 n], float32 or bfloat16."""
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    _run(_silu_kernel(NUMPY_TYPE[x.dtype]), x.numel() // (2 * size), x.numel(), x.data_ptr(), out.data_ptr(), size)
    return out


@cached_jit(fastmath=FAST, nogil=True, error_model="numpy")
def _silu_row(gate, up, out):  # type: ignore[no-untyped-def]
    for lane in range(out.shape[0]):
        x = widen(gate[lane])
        small = exp_negative(-abs(x))
        # exp of a negative number only, so that it cannot overflow
        above = x if x >= np.float32(0) else x * small
        silu = narrow(out[lane], above / (np.float32(1) + small))
        out[lane] = narrow(out[lane], widen(silu) * widen(up[lane]))


@functools.cache
def _silu_kernel(dtype: Any) -> tuple[Any, Callable]:
    @cached_jit(nogil=True, error_model="numpy")
    def share(w, first, last):  # type: ignore[no-untyped-def]
        size = w[9]
        x = carray(pointer(w[7]), (w[TOKENS], 2, size), dtype)
        out = carray(pointer(w[8]), (w[TOKENS], size), dtype)
        for token in range(first, last):
            _silu_row(x[token, 0], x[token, 1], out[token])

    return _compiled(share)


# Rotary embedding


def _rotary_hook(original: Callable) -> Callable:
    def forward(layer, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):  # type: ignore[no-untyped-def]
        plain = (
            offsets is None
            and fused_set_kv_buffer_arg is None
            and layer.is_neox_style
            and layer.rotary_dim == layer.head_size
            and not hasattr(layer, "sin_cos_cache")
            and positions.dim() == 1
            and layer.cos_sin_cache.dtype in (torch.float32, query.dtype)
            and query.dtype == key.dtype
            and all(x.dim() == 2 and x.stride(1) == 1 and x.shape[0] == positions.shape[0] for x in (query, key))
        )
        if not plain or not _usable(query):
            return original(layer, positions, query, key, offsets, fused_set_kv_buffer_arg)
        return rotate(positions, query, key, layer.cos_sin_cache, layer.head_size)

    return forward


def rotate(positions: Tensor, query: Tensor, key: Tensor, table: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Rotated query [T, Hq * D] and key [T, H * D] (rows may lie apart), by halves; positions [T] int64, table
    [most, D] the cosines and sines of every position."""
    out = tuple(torch.empty(x.shape, dtype=x.dtype) for x in (query, key))
    kernels = _rotary_kernel(NUMPY_TYPE[query.dtype], NUMPY_TYPE[table.dtype])
    tokens, positions, table = len(positions), positions.to(torch.int64), table.contiguous()
    _run(
        kernels,
        tokens,
        query.numel() + key.numel(),
        *(positions.data_ptr(), table.data_ptr(), table.shape[0], head_size),
        *(query.data_ptr(), query.stride(0), out[0].data_ptr(), query.shape[1]),
        *(key.data_ptr(), key.stride(0), out[1].data_ptr(), key.shape[1]),
    )
    return out  # type: ignore[return-value]


@cached_jit(fastmath={"nsz"}, nogil=True, error_model="numpy")
def _rotate_row(x, cos, sin, out):  # type: ignore[no-untyped-def]
    """Every product and sum rounded to the dtype, as torch does one call after another."""
    half = cos.shape[0]
    for lane in range(half):
        like = out[lane]
        c, s = widen(narrow(like, widen(cos[lane]))), widen(narrow(like, widen(sin[lane])))
        a, b = widen(x[lane]), widen(x[lane + half])
        low = widen(narrow(like, a * c)) - widen(narrow(like, b * s))
        high = widen(narrow(like, b * c)) + widen(narrow(like, a * s))
        out[lane] = narrow(like, low)
        out[lane + half] = narrow(like, high)


@functools.cache
def _rotary_kernel(dtype: Any, table_type: Any) -> tuple[Any, Callable]:
    @cached_jit(nogil=True, error_model="numpy")
    def share(w, first, last):  # type: ignore[no-untyped-def]
        positions, size = carray(pointer(w[7]), w[TOKENS], np.int64), w[10]
        table = carray(pointer(w[8]), (w[9], size), table_type)
        for token in range(first, last):
            if positions[token] < 0 or positions[token] >= w[9]:
                w[BAD] = 1
                continue
            angles = table[positions[token]]
            for at in (11, 15):
                stride, width = w[at + 1], w[at + 3]
                x = carray(pointer(w[at]), ((w[TOKENS] - 1) * stride + width), dtype)
                out = carray(pointer(w[at + 2]), (w[TOKENS], width), dtype)
                for head in range(0, width, size):
                    start = token * stride + head
                    row, rotated = x[start : start + size], out[token, head : head + size]
                    _rotate_row(row, angles[: size // 2], angles[size // 2 :], rotated)

    return _compiled(share)
