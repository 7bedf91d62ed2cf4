"""Which models can be compressed: recognised by structure, an ``o_proj`` beside a ``RadixAttention``, not by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModelError(ValueError):
    """The model's attention is of a kind whose cache cannot be compressed; the message names it."""


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer: SGLang's attention module and the output projection beside it."""

    layer_id: int
    attention: Any
    o_proj: Any


def find_attention_layers(model: Any) -> list[AttentionLayer]:
    """All attention layers of a loaded SGLang model, by layer id. Raises UnsupportedModelError."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    found: dict[int, AttentionLayer] = {}
    for name, module in model.named_modules():
        for child in module.children():
            if not isinstance(child, RadixAttention):
                continue
            if child.is_cross_attention or child.attn_type != AttentionType.DECODER:
                raise UnsupportedModelError(f"{name} is cross or encoder attention; only decoder-only models work")
            if child.sliding_window_size is not None and child.sliding_window_size > -1:
                raise UnsupportedModelError(
                    f"{name} attends to a sliding window of {child.sliding_window_size} tokens; "
                    "only models whose layers all have full attention work"
                )
            if child.qk_head_dim != child.v_head_dim or child.head_dim != child.v_head_dim:
                raise UnsupportedModelError(f"{name} has keys and values of different sizes (MLA); not supported")
            if child.tp_q_head_num % child.tp_k_head_num or child.tp_k_head_num != child.tp_v_head_num:
                raise UnsupportedModelError(
                    f"{name} has {child.tp_q_head_num} query and {child.tp_k_head_num} KV heads"
                )
            o_proj = getattr(module, "o_proj", None)
            if o_proj is None or not hasattr(o_proj, "quant_method"):
                raise UnsupportedModelError(
                    f"{name} has no o_proj beside its attention, so values cannot be projected; "
                    "serve this model without the laprox backends"
                )
            if child.layer_id in found:
                raise UnsupportedModelError(f"two attention modules share layer id {child.layer_id}")
            found[child.layer_id] = AttentionLayer(child.layer_id, child, o_proj)
    if not found:
        raise UnsupportedModelError(
            "the model has no RadixAttention layer with an o_proj (MLA, Mamba or encoder model)"
        )
    layers = [found[index] for index in sorted(found)]
    shapes = {(each.attention.tp_q_head_num, each.attention.tp_k_head_num, each.attention.head_dim) for each in layers}
    if len(shapes) > 1 or [each.layer_id for each in layers] != list(range(len(layers))):
        raise UnsupportedModelError(f"layers differ in shape or are not numbered 0..{len(layers) - 1}: {shapes}")
    return layers


def check(model_path: str) -> tuple[bool, str]:
    """What ``config.json`` alone can tell, for ``laprox-sglang doctor``: (may work, reason)."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return False, f"{file} does not exist; give the path of a Hugging Face model folder"
    config = json.loads(file.read_text())
    config = config.get("text_config", config)
    if config.get("is_encoder_decoder"):
        return False, "encoder-decoder model: only decoder-only models work"
    if config.get("kv_lora_rank"):
        return False, "multi-head latent attention (MLA): its cache has no per-head rows"
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention", "attention"}:
        return (
            False,
            f"hybrid layers ({', '.join(sorted(kinds))}): only models whose layers all have full attention work",
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return False, f"sliding window attention ({config['sliding_window']} tokens): not supported"
    if any(key.startswith(("mamba", "ssm", "linear_num")) for key in config):
        return False, "state space or linear attention layers: not supported"
    if not config.get("num_attention_heads"):
        return False, "config.json names no num_attention_heads"
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return True, f"{config.get('num_hidden_layers')} layers, {heads} query and {kv_heads} KV heads"
