"""Two recorded graphs for each decode batch size: one for dense batches, one for batches with compressed tokens.

SGLang's decode runner records every batch size once for each label of its ``attention_graph_variants`` and asks
``select`` which one a step replays. ``patches.graph_variants`` hands it these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DENSE = "laprox_dense"
COMPRESSED = "laprox_compressed"


@dataclass(frozen=True)
class DenseOrCompressed:
    """``next_is_compressed`` says so of the batch that was announced to the attention backend."""

    next_is_compressed: Callable[[], bool]
    capture_labels: ClassVar[tuple[str, ...]] = (DENSE, COMPRESSED)

    def select(self, forward_batch: ForwardBatch) -> str:
        return COMPRESSED if self.next_is_compressed() else DENSE


def check_environment() -> None:
    """Raises ValueError for a switch of SGLang that would record what has to run before each replay."""
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        raise ValueError(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH records the preparation of a step, which must look up page tables; "
            "unset it, or drop --laprox-cuda-graphs"
        )
