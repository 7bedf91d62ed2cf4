"""The error of the attention output against a loop in float64, and where the needle's tokens are."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

from laprox_sglang import demo_model
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.evaluation.in_scheduler import errors
from laprox_sglang.evaluation.items import tokenise
from laprox_sglang.evaluation.profile import added, needle_tokens
from laprox_sglang.evaluation.tasks import generate
from laprox_sglang.policy.select import Selection

LAYERS, HEADS, GROUP, SIZE, HIDDEN, TOKENS, STRETCH, START = 2, 2, 3, 4, 10, 20, 12, 15


def case():
    torch.manual_seed(0)
    pool = RowPool(torch.randn(LAYERS, 30, HEADS, SIZE), torch.randn(LAYERS, 30, HEADS, SIZE))
    slots = torch.randperm(29)[:TOKENS] + 1
    queries = [torch.randn(TOKENS, HEADS * GROUP, SIZE) for _ in range(LAYERS)]
    output = torch.randn(LAYERS, HEADS, GROUP, SIZE, HIDDEN)
    mask = torch.rand(LAYERS, HEADS, STRETCH) < 0.4
    mask[1, 1] = False
    counts = mask.sum(-1).flatten()
    selection = Selection(mask.nonzero()[:, 2].int(), torch.cat([torch.zeros(1), counts.cumsum(0)]).int())
    return pool, slots, queries, output, mask, selection


def naive(pool, slots, query, output, layer, keep, token, scale, cap):
    """[hidden] of one token: attention over the tokens that ``keep`` [H][n] says, through W_O."""
    total = torch.zeros(HIDDEN, dtype=torch.float64)
    for head in range(HEADS):
        for member in range(GROUP):
            q = query[token, head * GROUP + member].double()
            seen = [t for t in range(token + 1) if keep[head][t]]
            logits = []
            for t in seen:
                logit = float(q @ pool.k[layer, slots[t], head].double()) * scale
                logits.append(math.tanh(logit / cap) * cap if cap else logit)
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            mixed = sum(w * pool.v[layer, slots[t], head].double() for w, t in zip(weights, seen, strict=True))
            total += mixed @ output[layer, head, member].double()
    return total


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_attention_errors_against_a_loop(cap):
    pool, slots, queries, output, mask, selection = case()
    everything = Selection(
        torch.arange(STRETCH).repeat(LAYERS * HEADS).int(), (torch.arange(LAYERS * HEADS + 1) * STRETCH).int()
    )
    scales, caps = [0.5, 0.7], [cap] * LAYERS
    found = errors.attention_errors(pool, slots, queries, output, scales, caps, START, STRETCH, [everything, selection])
    assert max(found[0]) < 1e-6
    for layer in range(LAYERS):
        all_of = [[True] * TOKENS] * HEADS
        kept = [mask[layer, head].tolist() + [True] * (TOKENS - STRETCH) for head in range(HEADS)]
        rows = [
            [
                naive(pool, slots, queries[layer], output, layer, keep, t, scales[layer], cap)
                for t in range(START, TOKENS)
            ]
            for keep in (all_of, kept)
        ]
        full, ours = (torch.stack(each) for each in rows)
        assert found[1][layer] == pytest.approx(float((ours - full).norm() / full.norm()), rel=1e-4)


def test_queries_are_spread_over_a_long_continuation(monkeypatch):
    pool, slots, queries, output, _, selection = case()
    arguments = (pool, slots, queries, output, [0.5] * 2, [0.0] * 2, START, STRETCH, [selection])
    whole = errors.attention_errors(*arguments)
    monkeypatch.setattr(errors, "QUERIES", 2)
    some = errors.attention_errors(*arguments)
    assert some != whole and all(0 < each < 10 for each in some[0])


def test_needle_tokens_spell_the_value():
    tokenizer = AutoTokenizer.from_pretrained(str(demo_model.ensure(progress=False)))
    for item in generate("needle", tokenizer, [400], 5, 0):
        prompt = tokenise(item, tokenizer)
        places = needle_tokens(item, prompt, tokenizer)
        assert tokenizer.decode([prompt.document[place] for place in places]).strip() == item.expected[0]
    assert added([], [[1.0, 2.0]]) == [[1.0, 2.0]] and added([[1.0]], [[2.5]]) == [[3.5]]
