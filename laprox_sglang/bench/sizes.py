"""The lengths of the workloads, apart from the code that runs them: the command line is built from this alone."""

from __future__ import annotations

from dataclasses import dataclass

WORKLOAD_NAMES = ("prefill", "turn", "decode")


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens. ``runs`` samples are taken of every figure."""

    prompt: int = 4000
    context: int = 6000
    turn: int = 20
    batch: int = 4
    decode: int = 40
    runs: int = 5
    vocabulary: int = 40000
