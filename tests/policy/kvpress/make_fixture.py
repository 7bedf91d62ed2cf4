"""Makes ``kvpress.npz``: what NVIDIA's kvpress keeps of a prompt of a small random Llama, and the tensors it saw.

Run by hand in an environment of its own, because kvpress needs an older transformers than SGLang:

    python -m venv /tmp/kvpress && /tmp/kvpress/bin/pip install kvpress==0.5.5
    /tmp/kvpress/bin/python tests/policy/kvpress/make_fixture.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TOKENS, WINDOW = 120, 2
# The share that kvpress drops; PyramidKV falls back to SnapKV at the larger one.
RATIOS = (0.5, 0.75)
SHAPE = {
    "vocab_size": 500,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "attn_implementation": "sdpa",
}


def snap(ratio: float, kernel: int) -> SnapKVPress:
    return SnapKVPress(ratio, window_size=WINDOW, kernel_size=kernel)


def presses(ratio: float, kernel: int) -> dict[str, object]:
    found = {
        "snapkv": snap(ratio, kernel),
        "ada-snapkv": AdaKVPress(snap(ratio, kernel)),
        "criticalkv": CriticalKVPress(snap(ratio, kernel)),
        "ada-criticalkv": CriticalAdaKVPress(snap(ratio, kernel)),
        "streaming": StreamingLLMPress(ratio, n_sink=4),
    }
    if ratio == RATIOS[0]:
        found["pyramidkv"] = PyramidKVPress(ratio, window_size=WINDOW, kernel_size=kernel)
    return found


def main() -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    tokens = torch.randint(0, SHAPE["vocab_size"], (1, TOKENS))
    attention: list[torch.Tensor] = []
    original = SnapKVPress.compute_window_attention

    def recorded(*arguments: object) -> torch.Tensor:
        attention.append(original(*arguments))
        return attention[-1]

    SnapKVPress.compute_window_attention = staticmethod(recorded)
    layers, heads = SHAPE["num_hidden_layers"], SHAPE["num_key_value_heads"]
    with torch.no_grad():
        whole = DynamicCache()
        model(tokens, past_key_values=whole)
        saved: dict[str, np.ndarray] = {
            "values": torch.stack([layer.values[0] for layer in whole.layers]).numpy(),
            "output": torch.stack([layer.self_attn.o_proj.weight.T for layer in model.model.layers])
            .reshape(layers, heads, -1, SHAPE["head_dim"], SHAPE["hidden_size"])
            .numpy(),
        }
        for ratio in RATIOS:
            for kernel in (1, 5):
                for name, press in presses(ratio, kernel).items():
                    cache = DynamicCache()
                    attention.clear()
                    with press(model):
                        model(tokens, past_key_values=cache)
                    if attention:
                        saved["attention"] = torch.stack([each[0] for each in attention]).numpy()
                    saved[f"{name}/{ratio}/{kernel}"] = kept(model, cache, whole, "ada" in name)
    np.savez_compressed(Path(__file__).with_name("kvpress.npz"), **saved)


def kept(model: LlamaForCausalLM, cache: DynamicCache, whole: DynamicCache, masked: bool) -> np.ndarray:
    """[L, H, n] bool. Presses with budgets per head mask keys, the others drop them."""
    shape = (len(whole.layers), *whole.layers[0].keys.shape[1:3])
    mask = torch.ones(shape, dtype=torch.bool) if masked else torch.zeros(shape, dtype=torch.bool)
    for index, layer in enumerate(model.model.layers):
        if masked:
            _, head, position = layer.self_attn.masked_key_indices
            mask[index, head, position] = False
        else:
            same = cache.layers[index].keys[0][:, :, None] == whole.layers[index].keys[0][:, None]
            mask[index] = same.all(dim=-1).any(dim=1)
    return mask.numpy()


if __name__ == "__main__":
    main()
