"""Small functions that numba turns into vector code: number formats, exp, a logit cap; and its compile cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

logger = logging.getLogger(__name__)

# Not nnan and ninf: -inf is a logit here, and a NaN in a pool must reach the output.
FAST = {"reassoc", "contract", "nsz", "arcp"}
# bfloat16 and float16 come in as 16-bit integers, which numba can load as vectors; they need two integer types for
# numba to tell them apart.
NUMPY_VIEW = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
NUMPY_TYPE = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16}


def numpy_view(tensor: Tensor) -> np.ndarray:
    return tensor.view(NUMPY_VIEW[tensor.dtype]).numpy()


def cached(compiler: Callable[..., Any], **options: Any) -> Callable[[Callable], Any]:
    """``compiler`` (numba.njit, a bound numba.cfunc) with the compiled code kept on disk, or without where no cache
    folder can be written."""

    def decorate(function: Callable) -> Any:
        try:
            return compiler(cache=True, **options)(function)
        except RuntimeError as error:
            logger.warning("no numba cache (%s): the CPU kernels are compiled again at every start", error)
            return compiler(**options)(function)

    return decorate


def cached_jit(**options: Any) -> Callable[[Callable], Any]:
    return cached(numba.njit, **options)


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
def narrow(context, like, value):  # type: ignore[no-untyped-def]
    """``value`` (float32) in the format of ``like``: float32 itself, or bfloat16 bits (uint16), to nearest even."""
    if like not in (types.uint16, types.float32):
        return None

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        _, x = arguments
        if like == types.float32:
            return x
        word = ir.IntType(32)
        bits = builder.bitcast(x, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.lshr(builder.add(builder.add(bits, word(0x7FFF)), odd), word(16))
        # A NaN whose upper bits are all ones would overflow: any quiet NaN will do.
        result = builder.select(builder.fcmp_unordered("uno", x, x), word(0x7FC0), rounded)
        return builder.trunc(result, ir.IntType(16))

    return like(like, types.float32), generate


@intrinsic
def bits_as_float(context, bits):  # type: ignore[no-untyped-def]
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@numba.njit(fastmath=FAST, inline="always")
def exp_negative(x):  # type: ignore[no-untyped-def]
    """exp of x <= 0 to 1e-7 * (1 + |x|), relative, in operations that become vector code; 2**-126 is the least."""
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


@intrinsic
def float_as_bits(context, x):  # type: ignore[no-untyped-def]
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


# By integers of the same order: a maximum of floats, where a NaN may come, LLVM does not turn into vector code.
@cached_jit(nogil=True, error_model="numpy")
def highest(row):  # type: ignore[no-untyped-def]
    """The highest of a row as float32; -inf of an empty one, NaN where a NaN without sign is in it."""
    most = np.int32(-0x7F800001)  # -inf
    for index in range(row.shape[0]):
        bits = float_as_bits(widen(row[index]))
        ordered = bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))
        most = max(most, ordered)
    return bits_as_float(most ^ ((most >> np.int32(31)) & np.int32(0x7FFFFFFF)))
