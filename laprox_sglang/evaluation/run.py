"""The loop: every item, mode, policy and budget that the store does not have yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from laprox_sglang.evaluation import metrics
from laprox_sglang.evaluation.engine import TOGETHER, EvaluationEngine
from laprox_sglang.evaluation.items import Item, Prompt, tokenise
from laprox_sglang.evaluation.store import Row, Store
from laprox_sglang.evaluation.variants import FULL, Variant, full

AWARE, AGNOSTIC = "aware", "agnostic"
MODES = (AWARE, AGNOSTIC)
# A task counts where the full cache solves this share of it.
SOLVED = 0.8
# Prompts that the full cache answers together.
_BATCH = 8


@dataclass(frozen=True)
class Plan:
    """What to measure. ``answers``: ``solved`` asks the policies only where the full cache solves the task, ``all``
    always, ``none`` never. errors: also each layer's attention output. seconds: stop, resumable, after about so long.
    """

    model: str
    seed: int
    items: Sequence[Item]
    variants: Sequence[Variant]
    modes: Sequence[str] = MODES
    answers: str = "solved"
    errors: bool = False
    seconds: float = float("inf")


class Runner:
    """Args: start makes the engine, when something is missing; progress is called with a description and how many items
    are done more. ``close`` ends the engine.
    """

    def __init__(
        self,
        start: Callable[[], EvaluationEngine],
        tokenizer: Any,
        store: Store,
        plan: Plan,
        progress: Callable[[str, int], None],
    ):
        self.start, self.tokenizer, self.store, self.plan = start, tokenizer, store, plan
        self.progress = progress
        self.deadline = time.monotonic() + plan.seconds

    @cached_property
    def engine(self) -> EvaluationEngine:
        return self.start()

    def close(self) -> None:
        if "engine" in self.__dict__:
            self.engine.close()

    def run(self) -> bool:
        """Returns whether everything is measured (False: time was up)."""
        prompts = {id(item): tokenise(item, self.tokenizer) for item in self.plan.items}
        if self.plan.answers != "none" and not self._ask_full(prompts):
            return False
        solved = self.solved_tasks()
        for item in self.plan.items:
            if time.monotonic() > self.deadline:
                return False
            # A benchmark's mean is taken over all of it.
            counts = solved.get(item.task, False) or "benchmark" in item.meta
            ask = bool(item.expected) and (self.plan.answers == "all" or (self.plan.answers == "solved" and counts))
            self._measure(item, prompts[id(item)], ask)
            self.progress(item.task, 1)
        return True

    def solved_tasks(self) -> dict[str, bool]:
        return solved_tasks(self.store.rows, self.plan.model, self.plan.seed)

    # The full cache's own answers, which decide what counts

    def _ask_full(self, prompts: dict[int, Prompt]) -> bool:
        waiting = [item for item in self.plan.items if item.expected and not self._row(item, "-", FULL, 1.0)]
        waiting.sort(key=lambda item: item.new_tokens)
        while waiting:
            if time.monotonic() > self.deadline:
                return False
            batch = [item for item in waiting if item.new_tokens == waiting[0].new_tokens][:_BATCH]
            waiting = [item for item in waiting if item not in batch]
            self.progress("full cache", 0)
            asked = [prompts[id(item)].asked for item in batch]
            answers = self.engine.dense_answers(asked, batch[0].new_tokens, self._stop())
            self.store.add(
                [
                    {**self._key(item, "-", FULL, 1.0), **self._judged(item, answer)}
                    for item, answer in zip(batch, answers, strict=True)
                ]
            )
        return True

    # One item

    def _measure(self, item: Item, prompt: Prompt, ask: bool) -> None:
        missing = {
            mode: [each for each in self._variants() if self._lacks(item, mode, each, ask)]
            for mode in self._modes(prompt)
        }
        if not any(missing.values()):
            return
        answer_from = len(prompt.asked)
        self.engine.open(prompt.all, len(prompt.document))
        for mode, variants in missing.items():
            prefix = len(prompt.document) if mode == AGNOSTIC else len(prompt.asked)
            for start in range(0, len(variants), TOGETHER):
                group = variants[start : start + TOGETHER]
                found = self.engine.fork(prefix, answer_from, group, errors=self.plan.errors)
                rows = [self._fidelity_row(item, mode, each, found[each.key]) for each in group]
                if ask:
                    answers = self.engine.answers(prompt.asked, group, item.new_tokens, self._stop())
                    for row, answer in zip(rows, answers, strict=True):
                        row.update(self._judged(item, answer))
                self.store.add(rows)

    def _fidelity_row(self, item: Item, mode: str, variant: Variant, found: dict[str, Any]) -> Row:
        layers = found.pop("layer_errors", None)
        shown = {name: value for name, value in item.meta.items() if name not in ("label", "all_classes")}
        row = {**self._key(item, mode, variant.name, variant.ratio), **shown, **found}
        if layers is not None:
            row["output_error"] = sum(layers) / len(layers)
            row["layer_errors"] = [round(each, 5) for each in layers]
        return row

    def _judged(self, item: Item, answer: list[int]) -> Row:
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return {"accuracy": metrics.judge(item, text), "answer": text}

    def _variants(self) -> list[Variant]:
        return [full(), *self.plan.variants]

    def _modes(self, prompt: Prompt) -> list[str]:
        """Without a question both modes are the same."""
        return list(self.plan.modes) if prompt.question else [mode for mode in self.plan.modes if mode == AGNOSTIC]

    def _lacks(self, item: Item, mode: str, variant: Variant, ask: bool) -> bool:
        row = self._row(item, mode, variant.name, variant.ratio)
        return row is None or (ask and "accuracy" not in row) or (self.plan.errors and "output_error" not in row)

    def _row(self, item: Item, mode: str, policy: str, ratio: float) -> Row | None:
        return self.store.find(**self._key(item, mode, policy, ratio))

    def _key(self, item: Item, mode: str, policy: str, ratio: float) -> Row:
        return {
            "model": self.plan.model,
            "seed": self.plan.seed,
            "task": item.task,
            "index": item.index,
            "length": item.meta.get("length"),
            "mode": mode,
            "policy": policy,
            "ratio": ratio,
        }

    def _stop(self) -> list[int]:
        end = getattr(self.tokenizer, "eos_token_id", None)
        return [] if end is None else [end]


def solved_tasks(rows: Sequence[Row], model: str, seed: int) -> dict[str, bool]:
    """Of each task that was asked, whether the full cache solves at least ``SOLVED`` of it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["mode"] == "-" and row["model"] == model and row["seed"] == seed:
            found.setdefault(row["task"], []).append(row["accuracy"])
    return {task: sum(values) / len(values) >= SOLVED for task, values in found.items()}
