"""How many bytes a decode step moves between memory and chip, part by part, and how much faster keeping less can be.

A decode step is bound by memory: time cannot be less than bytes over bandwidth, whatever the device. So the ratio of
bytes bounds the speed-up, and a measured step can be set against its parts. Each number is counted once (what caches
save within a step is taken as saved); activations of a few tokens are left out.

    python -m laprox_sglang.kernels.byte_model

prints the page in ``kernels/bytes.md``.
"""

from __future__ import annotations

import math

from .shapes import LLAMA_3_1_8B, ModelShape

BATCHES = (1, 2, 4, 8)
CONTEXT, KEPT, TAIL = 131072, 0.05, 32
ITEM = 2  # bytes of a bfloat16 weight, key or value number
# Lists are cut into pieces: SGLang's into 8 at most (its default), ours so that 4 per multiprocessor (132 on an H100)
# share a layer's entries, and none is shorter than 256 entries.
SGLANG_SPLITS, PIECES, LEAST_PIECE = 8, 4 * 132, 256
WEIGHTS = "weights"


def dense_step(shape: ModelShape, batch: int, context: int) -> dict[str, float]:
    """Bytes of a step that reads every token: SGLang's own kernels, with an int64 slot number for each token."""
    row = shape.head_dim * ITEM * 2
    return {
        WEIGHTS: shape.weights_read(batch) * ITEM,
        "keys and values": batch * context * shape.layers * shape.kv_heads * row,
        "slot numbers": batch * context * shape.layers * 8,
        "new keys and values": batch * shape.layers * shape.kv_heads * row,
        "partial results": _parts(shape, batch * shape.kv_heads * SGLANG_SPLITS),
    }


def compressed_step(shape: ModelShape, batch: int, context: int, kept: float, tail: int) -> dict[str, float]:
    """Bytes of a step over a compressed prefix: ``kept`` of its entries, and the last ``tail`` tokens dense."""
    row = shape.head_dim * ITEM * 2
    lists = batch * shape.layers * shape.kv_heads
    entries = kept * (context - tail)
    of_layer = batch * shape.kv_heads
    piece = max(LEAST_PIECE, of_layer * (entries + tail) / PIECES)
    return {
        WEIGHTS: shape.weights_read(batch) * ITEM,
        "keys and values": lists * (entries + tail) * row,
        "row ids": lists * entries * 4,
        "slot numbers": batch * tail * shape.layers * 4,
        "offsets of the lists": batch * (shape.layers * shape.kv_heads + 1) * 8,
        "new keys and values": lists * row,
        "partial results": _parts(shape, of_layer * math.ceil((entries + tail) / piece)),
    }


def _parts(shape: ModelShape, pieces: int) -> float:
    """Each piece of a layer writes, and the merge reads, a float32 result and log-sum-exp for each head of a group."""
    return 2 * pieces * shape.layers * shape.group * (shape.head_dim + 1) * 4


def bound(dense: dict[str, float], compressed: dict[str, float]) -> float:
    """The most that a step can gain."""
    return sum(dense.values()) / sum(compressed.values())


def markdown(shape: ModelShape = LLAMA_3_1_8B, context: int = CONTEXT, kept: float = KEPT, tail: int = TAIL) -> str:
    lines = [
        f"# Bytes of a decode step: {shape.name}, {context:,} tokens, {kept:.0%} kept",
        "",
        "Computed by `python -m laprox_sglang.kernels.byte_model`, not measured. bfloat16; GB are 10^9 bytes. The",
        f"last {tail} tokens of a compressed prompt are dense. Time is at least bytes over bandwidth: the last row",
        "bounds the speed-up of a step on any device. `laprox-sglang bench-kernels` measures how near kernels come.",
        "",
        "| GB per step | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |",
        "|---" * (len(BATCHES) + 1) + "|",
    ]
    dense = [dense_step(shape, batch, context) for batch in BATCHES]
    compressed = [compressed_step(shape, batch, context, kept, tail) for batch in BATCHES]
    for title, steps in (("dense", dense), ("compressed", compressed)):
        for part in steps[0]:
            lines.append(_row(f"{title}: {part}", [step[part] for step in steps]))
        lines.append(_row(f"**{title}, all**", [sum(step.values()) for step in steps]))
    bounds = [f"{bound(one, other):.2f}" for one, other in zip(dense, compressed, strict=True)]
    lines.append("| **bound on the speed-up** | " + " | ".join(bounds) + " |")
    return "\n".join(lines) + "\n"


def _row(name: str, values: list[float]) -> str:
    cells = [f"{value / 1e9:.2f}" if value >= 1e8 else f"{value / 1e9:.2g}" for value in values]
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(markdown(), end="")
