"""Runs compiled code on the OpenMP threads that torch computes with.

A second set of threads (numba's own) shares the cores with torch's, which spin for a moment after each matmul: on 2
cores a parallel call between matmuls took 77 to 140 us with numba's workqueue layer and 25 us on torch's threads.

A kernel is a C function of one pointer to int64 *words*: addresses and sizes that Python put there. :func:`fork` calls
it once on each thread of the team, which may be fewer than asked for (``OMP_THREAD_LIMIT``, ``OMP_DYNAMIC``): a kernel
does the shares ``range(call(number), shares, call(size))``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from laprox_sglang.jit.numerics import cached

WORDS = types.CPointer(types.int64)
LIBRARIES = ("libgomp", "libiomp5", "libomp")


@dataclass(frozen=True)
class Team:
    """Addresses in torch's OpenMP runtime; 0 where there is none, and then everything runs on the calling thread."""

    parallel: int
    """``GOMP_parallel(void (*)(void *), void *, unsigned threads, unsigned flags)``"""
    number: int
    """``int omp_get_thread_num()``"""
    size: int
    """``int omp_get_num_threads()``"""

    @property
    def threads(self) -> int:
        return torch.get_num_threads() if self.parallel else 1


@functools.cache
def team() -> Team:
    """The runtime that ``import torch`` has loaded. LLVM's and Intel's also have GNU's entry points."""
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if line.rstrip().endswith(tuple("0123456789so"))})
    loaded = [path for path in paths if path.rsplit("/", 1)[-1].startswith(LIBRARIES)]
    # Torch's own first: another package may have brought a second one.
    for path in sorted(loaded, key=lambda path: "/torch/" not in path):
        library = ctypes.CDLL(path)
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        if all(hasattr(library, name) for name in names):
            return Team(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))
    return Team(0, 0, 0)


def kernel(**options: Any) -> Callable[[Callable], Any]:
    """Compile a function of one pointer to words as C function, kept on disk."""
    compiler = functools.partial(numba.cfunc, types.void(WORDS), nopython=True, error_model="numpy")
    return cached(compiler, **options)


@intrinsic
def fork(context, parallel, function, words, threads):  # type: ignore[no-untyped-def]
    """Call the kernel at address ``function`` with ``words`` on that many threads, and wait for all."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, kernel, data, count = arguments
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
        call = builder.inttoptr(target, signature.as_pointer())
        flags = number(0)
        count = builder.trunc(count, number)
        builder.call(call, [builder.inttoptr(kernel, pointer), builder.bitcast(data, pointer), count, flags])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, WORDS, types.int64), generate


@intrinsic
def call(context, address):  # type: ignore[no-untyped-def]
    """The result of the C function ``int f()`` at this address: ``Team.number`` or ``Team.size``."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        number = ir.IntType(32)
        function = builder.inttoptr(arguments[0], ir.FunctionType(number, []).as_pointer())
        return builder.zext(builder.call(function, []), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def pointer(context, address):  # type: ignore[no-untyped-def]
    """The address as a pointer, for ``numba.carray(pointer(address), shape, dtype)``."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def words_at(words: np.ndarray) -> Any:
    """The ctypes argument for a kernel, of int64 words that the caller keeps alive."""
    return ctypes.c_void_p(words.ctypes.data)


def c_function(compiled: Any) -> Any:
    """What Python calls a kernel by; the GIL is released meanwhile."""
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
