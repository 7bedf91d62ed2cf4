"""The contract of a score: one layer's window attention and values in, one number per (kv head, token) out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from laprox_sglang.config import GQA_RULES


@dataclass(frozen=True)
class LayerView:
    """What a score may look at, for one layer.

    H kv heads, G query heads per kv head, W window queries, D head size, and n tokens: the stretch, followed by the
    window's own tokens where those are scored too (their scores take part in the layer's sum only).

    attention: [H, G, W, n] float32, softmax probabilities; 0 where a query cannot see a token.
    values: [n, H, D], model dtype or float32.
    projection: [H, G, D, D] float32, a factor F of each query head's Gram matrix, F F^T = W_O^i W_O^i^T with W_O^i
        the [D, hidden] block of the output projection, so that ||v W_O^i|| = ||v F||.
    visible: [n] float32, how many of the W queries can see the token (at least 1); None means all W see every token.
    column_squares, norms: [H, G, n] float32, the sum of squared attention over the window and ||v F||, where the
        caller has them already: a fused kernel makes them without writing the attention, which is then None.
    window: W where attention is None.
    output: [H, G, D, hidden] model dtype or float32, W_O^i itself, for a score that says that it reads it: the Gram
        factor gives L2 norms only.
    """

    attention: Tensor | None
    values: Tensor
    projection: Tensor
    visible: Tensor | None
    column_squares: Tensor | None = None
    norms: Tensor | None = None
    window: int = 0
    output: Tensor | None = None

    @property
    def queries(self) -> int:
        """W."""
        return self.window if self.attention is None else self.attention.shape[2]

    def probabilities(self) -> Tensor:
        """``attention``, for a score that says that it reads it."""
        if self.attention is None:
            raise ValueError("this view has no attention; the score must set reads_attention = True")
        return self.attention

    def output_weights(self) -> Tensor:
        """``output``, for a score that says that it reads it."""
        if self.output is None:
            raise ValueError("this view has no output projection; the score must set reads_output = True")
        return self.output


@dataclass(frozen=True)
class ScoreOptions:
    """pool_kernel: odd width in tokens of the average pooling, 1 for none. gqa: one of config.GQA_RULES."""

    pool_kernel: int = 21
    gqa: str = "mean_attention"

    def __post_init__(self) -> None:
        if self.pool_kernel < 1 or self.pool_kernel % 2 == 0:
            raise ValueError(f"pool_kernel must be odd and at least 1, not {self.pool_kernel}")
        if self.gqa not in GQA_RULES:
            raise ValueError(f"unknown gqa rule {self.gqa!r}; choose from {', '.join(GQA_RULES)}")


class Score(ABC):
    """How much an entry is worth keeping. Pure: reads the view, changes nothing, never waits for the device.

    reads_attention: False for a score that needs only ``column_squares`` and ``norms``.
    reads_output: True for a score that needs ``LayerView.output``.
    every_query: True for a score that is a sum over all the prompt's queries, not only the window's: whoever calls it
        may add up the scores of views that share out the queries.
    """

    reads_attention: bool = True
    reads_output: bool = False
    every_query: bool = False

    @abstractmethod
    def __call__(self, view: LayerView, options: ScoreOptions) -> Tensor:
        """Returns [H, n] float32, at least 0; higher is kept first. Comparable within a layer."""

    def first_stage(self, view: LayerView, options: ScoreOptions) -> Tensor | None:
        """[H, n] float32: what the first half of each head's entries is chosen by; None for a one-stage score.

        With it, ``select`` chooses in two stages (CriticalKV, arXiv 2502.03805): these scores decide how many entries
        each head gets and which half comes first, ``__call__`` decides the rest.
        """
        return None
