"""``LAPROX_SGLANG_TRACE=folder``: every compression is written there as one file, for inspection and for tests.

A debugging aid: it waits for the device at each compression and writes files without bound.
"""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import numpy as np

from laprox_sglang.cache.tree import Stretch

TRACE_VARIABLE = "LAPROX_SGLANG_TRACE"
_numbers = count()


def trace_folder() -> Path | None:
    name = os.environ.get(TRACE_VARIABLE)
    return Path(name) if name else None


def write(folder: Path, stretch: Stretch, positions: np.ndarray, indptr: np.ndarray, sizes: tuple[int, int]) -> Path:
    """``NNNNN.npz`` with rid, start, tokens, end, layers, heads, positions [R] (from start) and indptr [L * H + 1]."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{next(_numbers):05d}.npz"
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez(
            file,
            rid=np.array(str(stretch.req.rid)),
            start=stretch.start,
            tokens=stretch.tokens,
            end=stretch.end,
            layers=sizes[0],
            heads=sizes[1],
            positions=positions,
            indptr=indptr,
        )
    partial.rename(path)
    return path
