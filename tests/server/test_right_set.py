"""The server keeps the entries that a plain reference keeps, and attends to exactly those.

The reference runs on Hugging Face transformers' own Q, K, V and W_O of the same float32 model (see hf_reference).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from laprox_sglang import demo_model
from tests.server.harness import LAPROX, Server, cached
from tests.server.hf_reference import Context, Reference, keep

LENGTHS = (1050, 1500, 2200, 3000, 4000)
# Real prose that comes with Python: chapters of its manual, and a question on each.
CHAPTERS = (
    ("execmodel", "How does the interpreter find out what a name refers to?"),
    ("debugger", "Which debugger command goes on until the current function returns?"),
    ("formatstrings", "How do I print a number with a thousands separator?"),
    ("types", "What is the difference between a mapping and a sequence?"),
    ("specialnames", "When is the method __del__ called, and what must it not rely on?"),
)
NEW, TOP, SINK = 8, 20, 4
OVERLAP = 0.999
# Log probabilities of two float32 implementations differ by about 1e-5, those of full attention by about 1.
TOLERANCE, DIFFERENT = 2e-4, 0.05


@dataclass
class Served:
    """One request: ``kept`` [L, H, stretch] bool is what its prompt's compression kept from token ``start`` on."""

    prompt: list[int]
    reply: dict[str, Any]
    start: int
    kept: torch.Tensor
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def stretch(self) -> int:
        return self.kept.shape[2]

    @property
    def output(self) -> list[int]:
        return self.reply["output_ids"]


def make_prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = []
    for length, (chapter, question) in zip(LENGTHS, CHAPTERS, strict=True):
        words = tokenizer(topics[chapter][: 7 * length], add_special_tokens=False)["input_ids"]
        assert len(words) > length
        message = {"role": "user", "content": tokenizer.decode(words[: length - 60]) + "\n\n" + question}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert all(1000 <= len(prompt) <= 4000 for prompt in prompts)
    return prompts


def ask(server: Server, trace: Path, prompt: list[int]) -> Served:
    before = server.idle_slots()
    rid = f"prompt-of-{len(prompt)}"
    reply = server.generate(prompt, NEW, rid=rid, return_logprob=True, top_logprobs_num=TOP)
    return Served(prompt, reply, *kept_entries(trace, rid, len(prompt)), before, server.idle_slots())


def kept_entries(trace: Path, rid: str, length: int) -> tuple[int, torch.Tensor]:
    """Start and kept entries [L, H, stretch] bool of the request's one compression at prefill end."""
    records = [np.load(file) for file in sorted(trace.glob("*.npz"))]
    (record,) = (each for each in records if str(each["rid"]) == rid and int(each["end"]) == length)
    layers, heads, tokens = (int(record[name]) for name in ("layers", "heads", "tokens"))
    positions, indptr = record["positions"], record["indptr"]
    assert len(indptr) == layers * heads + 1 and indptr[-1] == len(positions)
    kept = torch.zeros(layers * heads, tokens, dtype=torch.bool)
    for index, row in enumerate(kept):
        row[torch.from_numpy(positions[indptr[index] : indptr[index + 1]]).long()] = True
    assert int(kept.sum()) == len(positions), "an entry is listed twice"
    return int(record["start"]), kept.view(layers, heads, tokens)


def check_set(one: Served, scores: torch.Tensor, window: int, slots: int) -> None:
    """``slots``: the budget, in entries per (layer, kv head) on average."""
    budget = slots * one.kept.shape[0] * one.kept.shape[1]
    sink = SINK if one.start == 0 else 0
    assert one.start + one.stretch == len(one.prompt) - window
    assert int(one.kept.sum()) == budget
    for name, added in (("compressions", 1), ("entries_kept", budget), ("segments", 1), ("segment_slots", slots)):
        assert one.after[name] - one.before[name] == added, name
    assert one.kept[:, :, :sink].all()
    overlap = int((one.kept & keep(scores, one.stretch, budget, sink)).sum()) / budget
    print(f"{len(one.prompt)} tokens, {budget} entries: overlap {overlap:.6f}")
    assert overlap >= OVERLAP


def worst(one: Served, logprobs: torch.Tensor) -> float:
    """Largest difference between the server's top log probabilities and the reference's of the same tokens."""
    steps = one.reply["meta_info"]["output_top_logprobs"]
    assert len(steps) == NEW and all(len(step) == TOP for step in steps)
    return max(
        abs(value - float(expected[token]))
        for step, expected in zip(steps, logprobs, strict=True)
        for value, token, _ in step
    )


def check_logits(one: Served, reference: Reference, context: Context, visible: torch.Tensor) -> None:
    masked = worst(one, reference.forced(context, one.output[:-1], visible))
    full = worst(one, reference.forced(context, one.output[:-1], torch.ones_like(visible)))
    print(f"{len(one.prompt)} tokens: largest difference {masked:.2e}, from full attention {full:.2e}")
    assert masked < TOLERANCE
    assert full > DIFFERENT, "this prompt could not show a wrong set"


@pytest.fixture(scope="module")
def model() -> Path:
    return demo_model.ensure()


@pytest.fixture(scope="module")
def prompts(model) -> list[list[int]]:
    return make_prompts(model)


@pytest.fixture(scope="module")
def reference(model) -> Reference:
    return Reference(model, window=32)


# A server is gone before the reference computes: even an idle one takes a core.


@pytest.fixture(scope="module")
def served(model, prompts, tmp_path_factory) -> list[Served]:
    """Every prompt, each on an empty cache."""
    trace, answers = tmp_path_factory.mktemp("trace"), []
    flags = (*LAPROX, "--dtype", "float32", "--chunked-prefill-size", "8192", "--laprox-ratio", "0.2")
    with Server(model, *flags, env={"LAPROX_SGLANG_TRACE": str(trace)}) as server:
        for prompt in prompts:
            answers.append(ask(server, trace, prompt))
            server.flush()
    return answers


@pytest.fixture(scope="module", params=range(len(LENGTHS)), ids=[f"about-{length}" for length in LENGTHS])
def case(request, served, reference) -> tuple[Served, Context]:
    """One prompt, as the server and as the reference saw it."""
    one = served[request.param]
    return one, reference.prefill(one.prompt)


def test_kept_entries_equal_the_reference(case, reference):
    one, context = case
    assert one.start == 0
    scores = reference.scores(context, kernel=21, gqa="mean_attention", window=32)
    check_set(one, scores, window=32, slots=math.ceil(0.2 * one.stretch))


def test_decode_attends_to_exactly_the_kept_entries(case, reference):
    one, context = case
    check_logits(one, reference, context, one.kept)


def test_other_settings_and_a_second_turn(model, prompts, reference, tmp_path):
    """All that the set depends on is changed at once, prefill takes two chunks, and a turn follows on the first."""
    flags = (*LAPROX, "--dtype", "float32", "--chunked-prefill-size", "640", "--laprox-budget-tokens", "150")
    flags += ("--laprox-window", "16", "--laprox-pool-kernel", "7", "--laprox-gqa", "mean_score")
    with Server(model, *flags, env={"LAPROX_SGLANG_TRACE": str(tmp_path)}) as server:
        first = ask(server, tmp_path, prompts[0])
        new = first.output + prompts[1][:400]
        second = ask(server, tmp_path, prompts[0] + new)

    context = reference.prefill(first.prompt)
    check_set(first, reference.scores(context, kernel=7, gqa="mean_score", window=16), window=16, slots=150)
    check_logits(first, reference, context, first.kept)

    # The KV of the last token of an answer is computed by the next turn, with what the user says.
    assert second.start == len(first.prompt) + NEW - 1 == cached(second.reply)
    context = reference.prefill(new, before=context, visible=first.kept)
    scores = reference.scores(context, kernel=7, gqa="mean_score", window=16, start=second.start)
    check_set(second, scores, window=16, slots=150)
    between = torch.ones(*first.kept.shape[:2], second.start - first.stretch, dtype=torch.bool)
    check_logits(second, reference, context, torch.cat([first.kept, between, second.kept], dim=2))
