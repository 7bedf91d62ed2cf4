"""The commands of the evaluation, as the engine's process sends them, and the readings that go back."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from laprox_sglang.config import LaProxConfig
from laprox_sglang.evaluation.in_scheduler.errors import attention_errors
from laprox_sglang.evaluation.in_scheduler.forks import Fork, Forks
from laprox_sglang.evaluation.in_scheduler.recorder import Logits, Recorder
from laprox_sglang.evaluation.protocol import REFERENCE

_session: Session | None = None


def handle(scheduler: Any, request: str) -> None:
    """``request`` is a JSON object with ``command``, its arguments, and ``reply``, the file for the answer.

    Raises ValueError for what cannot be done; SGLang hands the message to the engine's process.
    """
    global _session
    if _session is None:
        _session = Session(scheduler)
    arguments = json.loads(request)
    command, reply = arguments.pop("command"), Path(arguments.pop("reply"))
    if command not in ("begin", "fork", "collect", "attention_to"):
        raise ValueError(f"unknown evaluation command {command!r}")
    reply.write_text(json.dumps(getattr(_session, command)(**arguments)))


@dataclass
class _Reference:
    """The dense document's own reading. ``logprobs`` [n - first, V]: of the tokens from position ``first`` on."""

    tokens: list[int]
    first: int
    logprobs: Tensor | None = None
    queries: list[Tensor] | None = None


class Session:
    """One document at a time: ``begin``, its dense prefill, then ``fork``, the copies' requests and ``collect``."""

    def __init__(self, scheduler: Any):
        from laprox_sglang import runtime

        ours = runtime.current()
        if ours is None:
            raise ValueError("the engine runs without the laprox cache")
        self.runtime = ours
        self.tree = ours.tree
        self.output = ours.output_weights()
        model = scheduler.tp_worker.model_runner.model
        self.recorder = Recorder(model, ours.layers, self._observe)
        ours.batch_observer = self._see_batch
        # The dense document and what is read after a copy stay as they are.
        self.tree.frozen = True
        self.reference: _Reference | None = None
        self.forks: Forks | None = None
        self.made: dict[str, Fork] = {}
        self.measured_from = 0
        self.readings: dict[str, dict[str, Any]] = {}

    # Commands

    def begin(self, tokens: list[int], first: int) -> dict[str, Any]:
        """A new document; its logits will be needed for the tokens from position ``first`` on."""
        self.reference = _Reference(tokens, first)
        self.forks = None
        self.made, self.readings = {}, {}
        self.recorder.start()
        return {}

    def fork(
        self, prefix: int, measured_from: int, variants: list[dict[str, Any]], errors: bool, reading: bool
    ) -> dict[str, Any]:
        """Copies of the first ``prefix`` tokens, one for each variant (salt, ratio, settings).

        Returns by salt what each holds and, if asked, its layers' attention errors. With ``reading``, the next requests
        with these salts are compared with the reference, on the tokens from position ``measured_from`` on.
        """
        reference, forks = self._ready(), self._document()
        self.readings, self.measured_from = {}, measured_from
        self.made = {}
        for variant in variants:
            config = LaProxConfig.from_dict(variant["settings"])
            self.made[variant["salt"]] = forks.make(
                variant["salt"], reference.tokens[:prefix], config, variant["ratio"]
            )
        rows = self.tree.pool.rows_per_slot
        found: dict[str, Any] = {
            salt: {"slots": fork.slots, "entries": fork.entries, "share": fork.entries / (fork.prefix * rows)}
            for salt, fork in self.made.items()
        }
        if errors:
            for salt, layers in self._errors(measured_from).items():
                found[salt]["layer_errors"] = layers
        if not reading:
            self.made = {}
        return found

    def collect(self) -> dict[str, Any]:
        """The readings since ``fork``, by salt; whatever comes next is not compared."""
        found, self.readings, self.made = self.readings, {}, {}
        return found

    def attention_to(self, prefix: int, window: int, positions: list[int]) -> list[list[float]]:
        """Mean attention of the last ``window`` of ``prefix`` tokens to the tokens at ``positions``, [L][H], summed."""
        settings = {"score": "attention", "allocation": "head", "pool_kernel": 1, "window": window}
        scored = self._document().scored(prefix, LaProxConfig.from_dict(settings))
        return scored.scores[:, :, torch.tensor(positions)].sum(dim=-1).tolist()

    # What the model computes

    def _see_batch(self, batch: Any) -> None:
        self.recorder.salts = [req.cache_salt for req in batch.reqs] if batch.forward_mode.is_extend() else []

    def _observe(self, salt: str, start: int, ids: Tensor, hidden: Tensor, logits: Logits) -> None:
        reference = self.reference
        if reference is None:
            return
        if salt == REFERENCE and self.recorder.recording:
            skip = max(0, reference.first - 1 - start)
            if skip < hidden.shape[0]:
                found = F.log_softmax(logits(hidden[skip:]), dim=-1)
                known = reference.logprobs
                reference.logprobs = found if known is None else torch.cat([known, found])
        elif salt in self.made:
            self.readings[salt] = self._compare(self.made[salt], start, ids, hidden, logits)

    def _compare(self, fork: Fork, start: int, ids: Tensor, hidden: Tensor, logits: Logits) -> dict[str, Any]:
        """Means over the measured tokens: loss and KL in nats, share of equal first choices."""
        reference = self._ready()
        if start != fork.prefix - 1:
            return {"error": f"{start} of the copy's {fork.prefix - 1} tokens were cached"}
        # The token at position p is predicted by the hidden state at p - 1.
        skip = self.measured_from - 1 - start
        ours = F.log_softmax(logits(hidden[skip:-1]), dim=-1)
        assert reference.logprobs is not None
        at = self.measured_from - reference.first
        full = reference.logprobs[at : at + ours.shape[0]]
        true = ids[skip + 1 :].long()[:, None]
        loss = (full.gather(1, true) - ours.gather(1, true)).mean()
        divergence = (full.exp() * (full - ours)).sum(dim=-1).mean()
        same = (full.argmax(dim=-1) == ours.argmax(dim=-1)).float().mean()
        return {
            "loss": float(loss),
            "kl": float(divergence),
            "same": float(same),
            "full_loss": float(-full.gather(1, true).mean()),
            "tokens": ours.shape[0],
        }

    def _errors(self, start: int) -> dict[str, list[float]]:
        forks, base = self.forks, self.runtime.compressor
        assert forks is not None
        stretches = {fork.stretch for fork in self.made.values()}
        found: dict[str, list[float]] = {}
        for stretch in stretches:
            group = [fork for fork in self.made.values() if fork.stretch == stretch]
            selections = [fork.selection for fork in group]
            layers = attention_errors(
                self.tree.pool,
                forks.slots,
                forks.ring.queries,
                self.output,
                base.scales,
                base.caps,
                start,
                stretch,
                selections,
            )
            found.update({fork.salt: each for fork, each in zip(group, layers, strict=True)})
        return found

    def _ready(self) -> _Reference:
        reference = self.reference
        if reference is None or reference.logprobs is None:
            raise ValueError("the dense document has not been read yet")
        return reference

    def _document(self) -> Forks:
        reference = self._ready()
        if self.forks is None:
            self.forks = self._locked(reference)
        return self.forks

    def _locked(self, reference: _Reference) -> Forks:
        """The dense document, held in the tree until the cache is flushed."""
        queries = self.recorder.stop()
        if queries[0].shape[0] != len(reference.tokens):
            raise ValueError(f"{queries[0].shape[0]} of the document's {len(reference.tokens)} tokens were computed")
        key = RadixKey(array("q", reference.tokens), cache_salt=REFERENCE)
        walk = self.tree._descend(key)
        if walk.matched < len(reference.tokens):
            raise ValueError(f"only {walk.matched} of the document's {len(reference.tokens)} tokens are cached")
        self.tree.inc_lock_ref(walk.node)
        return Forks(self.runtime.compressor, self.tree, torch.cat(walk.values), queries, self.output)
