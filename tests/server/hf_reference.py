"""A plain reference for what LaProx keeps, and for attention over it: Hugging Face transformers and torch alone.

Nothing of ``laprox_sglang`` takes part: the formulas are written out once more, the slow and obvious way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

NAME = "laprox_test_reference"


@dataclass
class Context:
    """A sequence so far: per layer the last post-RoPE queries [Hq, W, D], all keys and values [H, n, D].

    visible: [L, H, v] bool, which of the first v tokens the newest tokens' queries saw; None: all.
    logprobs: [vocabulary], of the token that comes next.
    """

    cache: DynamicCache
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    visible: Tensor | None
    logprobs: Tensor

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]


class Reference:
    """A float32 model whose attention function is ours; ``window`` queries are recorded at most."""

    def __init__(self, folder: Path, window: int):
        AttentionInterface.register(NAME, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME)
        self.model.eval()
        config = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.group = config.num_attention_heads // self.heads
        self.window = window

    def _attend(self, module, query, key, value, attention_mask, scaling, **_):
        """Causal attention of one sequence, of what ``self.visible`` shows."""
        self.queries.append(query[0, :, -self.window :].clone())
        self.keys.append(key[0])
        self.values.append(value[0])
        new, total = query.shape[2], key.shape[2]
        key, value = (each.repeat_interleave(self.group, dim=1) for each in (key, value))
        if self.visible is None:
            assert new == total
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        else:
            seen = self._seen(module.layer_idx, self.visible, new, total).repeat_interleave(self.group, dim=0)
            logits = (query @ key.transpose(2, 3)) * scaling
            output = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value
        return output.transpose(1, 2), None

    def _seen(self, layer: int, visible: Tensor | None, new: int, total: int) -> Tensor:
        """[H, new, total] bool: which keys the queries of the last ``new`` tokens see."""
        seen = torch.ones(self.heads, new, total, dtype=torch.bool).tril(total - new)
        if visible is not None:
            seen[:, :, : visible.shape[2]] &= visible[layer][:, None]
        return seen

    def _run(self, cache: DynamicCache, tokens: list[int], visible: Tensor | None, logits: int) -> Tensor:
        self.queries, self.keys, self.values, self.visible = [], [], [], visible
        output = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=logits)
        assert len(self.keys) == self.layers
        return output.logits[0].log_softmax(dim=-1)

    @torch.inference_mode()
    def prefill(self, tokens: list[int], before: Context | None = None, visible: Tensor | None = None) -> Context:
        """``tokens`` at the start, or after ``before``; their queries see ``visible`` of the first tokens there."""
        cache = DynamicCache() if before is None else before.cache
        (logprobs,) = self._run(cache, tokens, visible, logits=1)
        return Context(cache, self.queries, self.keys, self.values, visible, logprobs)

    @torch.inference_mode()
    def forced(self, context: Context, tokens: list[int], visible: Tensor) -> Tensor:
        """Log probabilities [1 + T, vocabulary] after the context and after each of T forced ``tokens``.

        The forced tokens' queries see ``visible``. The context stays what it was.
        """
        logprobs = self._run(context.cache, tokens, visible, logits=len(tokens))
        context.cache.crop(-len(tokens))
        return torch.cat([context.logprobs[None], logprobs])

    @torch.inference_mode()
    def scores(self, context: Context, kernel: int, gqa: str, window: int, start: int = 0) -> Tensor:
        """[L, H, n - start] normalised scores of the tokens from ``start`` on, the window's own included."""
        layers = []
        for layer, block in enumerate(self.model.model.layers):
            w_o = block.self_attn.o_proj.weight
            causal = self._seen(layer, None, window, context.length)[0]
            heads = []
            for head, seen in enumerate(self._seen(layer, context.visible, window, context.length)):
                keys, values = context.keys[layer][head], context.values[layer][head, start:]
                dim = keys.shape[1]
                attention, norms = [], []
                for i in range(head * self.group, (head + 1) * self.group):
                    logits = context.queries[layer][i, -window:] @ keys.T / dim**0.5
                    a = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
                    # RMS over the queries behind the token; sqrt(W) times it is the L2 norm where that is all of them
                    column = ((a**2).sum(dim=0) / causal.sum(dim=0)).sqrt() * window**0.5
                    attention.append(average(column[start:], kernel))
                    norms.append((values @ w_o[:, i * dim : (i + 1) * dim].T).norm(dim=-1))
                a, v = torch.stack(attention), torch.stack(norms)
                heads.append(a.mean(0) * v.mean(0) if gqa == "mean_attention" else (a * v).mean(0))
            score = torch.stack(heads)
            layers.append(score / score.sum())
        return torch.stack(layers)


def average(values: Tensor, kernel: int) -> Tensor:
    """Each number with its (kernel - 1) / 2 neighbours on both sides, as far as they exist."""
    half, length = kernel // 2, len(values)
    running = F.pad(values.double().cumsum(0), (1, 0))
    index = torch.arange(length)
    low, high = (index - half).clamp(min=0), (index + half + 1).clamp(max=length)
    return ((running[high] - running[low]) / (high - low)).float()


def keep(scores: Tensor, stretch: int, total: int, sink: int) -> Tensor:
    """[L, H, stretch] bool: the first ``sink`` tokens and the best others of the whole model, ``total`` in all."""
    candidates = scores[:, :, :stretch].clone()
    candidates[:, :, :sink] = float("inf")
    kept = torch.zeros(candidates.numel(), dtype=torch.bool)
    kept[candidates.flatten().topk(total).indices] = True
    return kept.view(candidates.shape)
