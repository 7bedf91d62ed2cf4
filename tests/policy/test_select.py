from __future__ import annotations

import math

import pytest
import torch
from naive import naive_keep
from policies import ALLOCATIONS, HIDDEN, POLICIES, allocation_for, layer_weights

from laprox_sglang.policy.normalise import layer_normalise
from laprox_sglang.policy.registry import get_allocation, get_score
from laprox_sglang.policy.scores.base import LayerView, ScoreOptions
from laprox_sglang.policy.select import select


def first(tokens, count):
    return torch.arange(tokens) < count


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 63), (3, 2, 100), (4, 7, 5)], ids=str)
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_against_brute_force(name, shape):
    layers, heads, stretch = shape
    tokens = stretch + 6
    scores = torch.rand(layers, heads, tokens, generator=torch.Generator().manual_seed(stretch))
    # the window's own tokens weigh on the layer sum, but are not kept
    scores[:, :, stretch:] += 10 * torch.arange(layers).view(-1, 1, 1)
    allocation = allocation_for(name, layers, heads)
    compared = layer_normalise(scores) if allocation.normalised else scores
    entries = layers * heads * stretch
    for total in sorted({0, 1, entries // 4, entries, entries + 1}):
        selection = select(scores, total, allocation, first(tokens, 2), stretch, weights=layer_weights(layers))
        kept = naive_keep(name, compared[:, :, :stretch], total, first(tokens, 2)[:stretch])
        expected = sorted((layer, head, position) for position, layer, head in kept)
        assert selection.positions.dtype == selection.indptr.dtype == torch.int32
        assert selection.positions.tolist() == [position for _, _, position in expected]
        rows = [layer * heads + head for layer, head, _ in expected]
        counts = torch.bincount(torch.tensor(rows, dtype=torch.int64), minlength=layers * heads)
        assert selection.indptr.tolist() == [0, *counts.cumsum(0).tolist()]


def test_the_window_takes_part_in_the_layer_sum():
    """Layer 1's attention lies in the window, so its stretch is worth less, though its stretch scores are the same."""
    scores = torch.rand(1, 1, 60).repeat(2, 1, 1)
    scores[1, :, 50:] = 100
    indptr = select(scores, 40, get_allocation("model"), first(60, 0), 50).indptr.tolist()
    assert indptr == [0, 40, 40]


def test_lists_may_be_empty():
    scores = torch.rand(2, 2, 30) + 1
    scores[0, 1] = scores[1, 0] = 0
    selection = select(scores, 50, get_allocation("model_raw"), first(30, 0), 30)
    sizes = selection.indptr.diff().tolist()
    assert sizes[1] == sizes[2] == 0 and sum(sizes) == 50


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_broken_scores_do_not_break_the_count(name):
    scores = torch.rand(3, 2, 40)
    scores[0] = math.nan
    scores[1, :, ::3] = math.inf
    scores[2, 1] = -math.inf
    selection = select(scores, 100, allocation_for(name, 3, 2), first(40, 4), 35, weights=layer_weights(3))
    assert len(selection.positions) == 100 == selection.indptr[-1]
    for row in range(6):
        positions = selection.positions[selection.indptr[row] : selection.indptr[row + 1]]
        assert (positions.diff() > 0).all() and (positions >= 0).all() and (positions < 35).all()


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_an_empty_stretch(name):
    selection = select(torch.rand(2, 2, 8), 5, allocation_for(name, 2, 2), first(8, 1), 0, weights=layer_weights(2))
    assert selection.positions.shape == (0,) and selection.indptr.tolist() == [0] * 5


@pytest.mark.parametrize("total, stretch, protected", [(-1, 8, 8), (5, 9, 8), (5, -1, 8), (5, 8, 7)])
def test_sizes_that_do_not_fit(total, stretch, protected):
    with pytest.raises(ValueError, match="scores cover 8 tokens"):
        select(torch.rand(2, 2, 8), total, get_allocation("model"), first(protected, 1), stretch)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_never_waits_for_the_device(name):
    """On the meta device reading a number back raises, and so does mixing in a tensor that was left on the CPU."""
    scores, protected = torch.rand(3, 2, 40).to("meta"), first(40, 4).to("meta")
    weights = layer_weights(3).to("meta")
    selection = select(scores, 50, allocation_for(name, 3, 2), protected, 35, first=scores, weights=weights)
    assert selection.positions.is_meta and selection.positions.shape == (50,)
    assert selection.indptr.is_meta and selection.indptr.shape == (7,)


NEEDLE = range(120, 126)


def needle_layer(layer: int) -> LayerView:
    """The window looks for six neighbouring tokens in 600; the other attention is noise."""
    generator = torch.Generator().manual_seed(layer)
    heads, group, window, tokens, size = 2, 2, 8, 600, 8
    logits = torch.randn(heads, group, window, tokens, generator=generator)
    logits[..., NEEDLE.start : NEEDLE.stop] += 6
    return LayerView(
        attention=logits.softmax(-1),
        values=torch.randn(tokens, heads, size, generator=generator),
        projection=torch.randn(heads, group, size, size, generator=generator),
        visible=None,
        output=torch.randn(heads, group, size, HIDDEN, generator=generator),
    )


@pytest.mark.parametrize("score, allocation", POLICIES)
def test_planted_needle(score, allocation):
    """At a twentieth of the entries every policy that looks keeps the needle; the ones that do not look lose it."""
    options = ScoreOptions(pool_kernel=5)
    views = [needle_layer(layer) for layer in range(4)]
    scores = torch.stack([get_score(score)(view, options) for view in views])
    early = [get_score(score).first_stage(view, options) for view in views]
    selection = select(
        scores,
        scores.numel() // 20,
        allocation_for(allocation, 4, 2),
        first(600, 4),
        600,
        first=None if early[0] is None else torch.stack(early),
        weights=torch.arange(4, 0, -1, dtype=torch.float64),
    )
    found = sum(int((selection.positions == position).sum()) for position in NEEDLE) / (len(NEEDLE) * 4 * 2)
    if score in ("random", "streaming"):
        assert found < 0.2
    else:
        assert found > 0.8


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_two_stages_against_brute_force(name):
    """Budgets of the heads from the first stage's scores; half of each by them, the rest by the second's."""
    layers, heads, stretch = 3, 2, 40
    generator = torch.Generator().manual_seed(3)
    early, late = (torch.rand(layers, heads, stretch, generator=generator) for _ in range(2))
    allocation = allocation_for(name, layers, heads)
    compared = layer_normalise(early) if allocation.normalised else early
    for total in (0, 1, 61, 100, 239, 240, 300):
        selection = select(
            late, total, allocation, first(stretch, 2), stretch, first=early, weights=layer_weights(layers)
        )
        budgets = naive_keep(name, compared, total, first(stretch, 2))
        for row in range(layers * heads):
            layer, head = divmod(row, heads)
            count = sum(1 for entry in budgets if entry[1:] == (layer, head))
            guarded = lambda position: position >= 2  # noqa: E731
            by_first = sorted(range(stretch), key=lambda p: (guarded(p), -early[layer, head, p] * guarded(p), p))
            half = by_first[: count // 2]
            kept = {*half, *(p for p in range(2) if count > p)} if count else set()
            for position in sorted(range(stretch), key=lambda p: (-late[layer, head, p], p)):
                if len(kept) < count:
                    kept.add(position)
            found = selection.positions[selection.indptr[row] : selection.indptr[row + 1]].tolist()
            assert found == sorted(kept), (total, row)
