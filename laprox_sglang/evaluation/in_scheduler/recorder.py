"""What the model computes over the dense document: every layer's queries, and the distribution of the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laprox_sglang.model_support import AttentionLayer

# (request's cache salt, position of its first new token, its new tokens' ids [n], hidden states [n, hidden], logits)
Logits = Callable[[Tensor], Tensor]
Observer = Callable[[str, int, Tensor, Tensor, Logits], None]


class Recorder:
    """Forward hooks of torch on the model's attention layers and logits processor. ``remove`` takes them off.

    While ``recording``, the post-RoPE queries of extend batches are kept (one request at a time). ``observer`` is
    called for each request of an extend batch, before SGLang computes its logits.
    """

    def __init__(self, model: Any, layers: list[AttentionLayer], observer: Observer):
        self.recording = False
        self.salts: list[str | None] = []
        self.observer = observer
        self._parts: list[list[Tensor]] = [[] for _ in layers]
        self._handles = [
            layer.attention.register_forward_pre_hook(self._keep_query(index, layer.attention.tp_q_head_num))
            for index, layer in enumerate(layers)
        ]
        self._handles.append(model.logits_processor.register_forward_pre_hook(self._see_hidden))

    def start(self) -> None:
        self._parts = [[] for _ in self._parts]
        self.recording = True

    def stop(self) -> list[Tensor]:
        """Each layer's queries of all tokens since ``start``, ``[n, Hq, D]``."""
        self.recording = False
        return [torch.cat(parts) for parts in self._parts]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_query(self, index: int, heads: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(module: Any, arguments: tuple[Any, ...]) -> None:
            if self.recording:
                query = arguments[0]
                self._parts[index].append(query.detach().reshape(query.shape[0], heads, -1).clone())

        return hook

    def _see_hidden(self, module: Any, arguments: tuple[Any, ...]) -> None:
        input_ids, hidden, head, forward_batch = arguments[:4]
        if not forward_batch.forward_mode.is_extend() or not any(self.salts):
            return
        from sglang.srt.layers.logits_processor import LogitsMetadata

        metadata = LogitsMetadata.from_forward_batch(forward_batch)

        def logits(states: Tensor) -> Tensor:
            return module._get_logits(states, head, metadata, use_logits_buffer=False).float()

        at = 0
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for salt, (start, length) in zip(self.salts, lengths, strict=True):
            if salt:
                self.observer(salt, start, input_ids[at : at + length], hidden[at : at + length], logits)
            at += length
