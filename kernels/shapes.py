"""Sizes of the models that benchmarks and the byte model speak of, and how many weights a decode step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs. ``experts`` 0: one MLP of width ``intermediate``; else each expert has that width.

    ``head_norms``: norms on each head's query and key (Qwen3).
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    head_norms: bool = False

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def expert_weights(self) -> int:
        """Weights of one MLP or expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_weights(self) -> int:
        """Weights of a layer without its MLP or experts."""
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return attention + norms + self.hidden * self.experts

    @property
    def parameters(self) -> int:
        """All weights: layers, input and output embedding, last norm."""
        layer = self.layer_weights + self.expert_weights * max(1, self.experts)
        return self.layers * layer + 2 * self.hidden * self.vocabulary + self.hidden

    def weights_read(self, batch: int) -> float:
        """Weights that one decode step of ``batch`` requests reads, each once.

        Of the input embedding a few rows. Of the experts as many as ``batch`` tokens reach, if each chooses at random.
        """
        reached = 1.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** batch
            reached = self.experts * (1 - missed)
        layer = self.layer_weights + self.expert_weights * reached
        return self.layers * layer + self.hidden * (self.vocabulary + 1 + batch)


LLAMA_3_1_8B = ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, head_norms=True)
QWEN3_30B_A3B = ModelShape(
    "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, experts=128, experts_per_token=8, head_norms=True
)
MODELS = {shape.name: shape for shape in (LLAMA_3_1_8B, QWEN3_8B, QWEN3_30B_A3B)}
