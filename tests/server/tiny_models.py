"""Small random-weight models of the supported families, saved as Hugging Face folders: float32, fast, deterministic."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY = 2048
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    # Larger than usual, so that attention is far from uniform and logits are far apart.
    "initializer_range": 0.12,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"use_sliding_window": False}),
    "qwen3": (Qwen3Config, {"use_sliding_window": False}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
}


@cache
def tiny_model(family: str = "llama") -> Path:
    """The folder of a random model; made once per test run."""
    config_class, extra = FAMILIES[family]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_class(**SHAPE, **extra), dtype=torch.float32)
    folder = Path(mkdtemp(prefix=f"laprox-{family}-"))
    model.save_pretrained(folder)
    return folder


def tokens(length: int, seed: int) -> list[int]:
    """A random prompt of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, VOCABULARY, (length,), generator=generator).tolist()
