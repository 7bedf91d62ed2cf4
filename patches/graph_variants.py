"""Has each decode batch size recorded twice, dense and compressed, and the fitting graph replayed.

Stock records one graph, whose kernels read every token's own slot. It knows variants for one model family only, and
asks this function for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = "sglang.srt.layers.attention.graph_variants.create_attention_graph_variants"
TYPE = "around"
PARAMETERS = ("hf_config",)


def hook(original: Callable[[Any], Any], hf_config: Any) -> Any:
    from laprox_sglang.attention import backend, graph_variants

    ours = backend.current()
    if ours is None:
        return original(hf_config)
    return graph_variants.DenseOrCompressed(lambda: ours.next_is_compressed)
