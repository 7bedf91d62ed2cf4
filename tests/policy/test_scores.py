from __future__ import annotations

import dataclasses

import pytest
import torch
from naive import NAIVE_SCORES, naive_score
from policies import SCORES, make_view

from laprox_sglang.config import GQA_RULES
from laprox_sglang.policy.registry import get_score
from laprox_sglang.policy.scores import parts
from laprox_sglang.policy.scores.base import ScoreOptions
from laprox_sglang.policy.scores.parts import value_norms
from laprox_sglang.policy.scores.random import Random


def check(name, view, options):
    score = get_score(name)(view, options)
    expected = torch.tensor(naive_score(name, view, options), dtype=torch.float64)
    assert score.dtype == torch.float32
    assert (score >= 0).all()
    torch.testing.assert_close(score.double(), expected, rtol=2e-5, atol=1e-7)


def test_every_score_has_a_naive_twin():
    assert set(SCORES) == {*NAIVE_SCORES, "streaming"}


@pytest.mark.parametrize("gqa", GQA_RULES)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("name", SCORES)
def test_against_naive_by_group(name, group, gqa):
    check(name, make_view(63, heads=3, group=group, own=5), ScoreOptions(pool_kernel=7, gqa=gqa))


@pytest.mark.parametrize("kernel", [1, 21])
@pytest.mark.parametrize("tokens", [1, 2, 63, 100])
@pytest.mark.parametrize("name", SCORES)
def test_against_naive_by_size(name, tokens, kernel):
    check(name, make_view(tokens), ScoreOptions(pool_kernel=kernel))


@pytest.mark.parametrize("name", SCORES)
def test_half_precision_values(name):
    check(name, make_view(63, own=5, dtype=torch.bfloat16), ScoreOptions())


@pytest.mark.parametrize("name", SCORES)
def test_window_of_one_query(name):
    check(name, make_view(20, window=1, own=1), ScoreOptions(pool_kernel=3))


def test_group_rules_differ():
    view = make_view(63, group=4)
    one, other = (get_score("laprox")(view, ScoreOptions(gqa=gqa)) for gqa in GQA_RULES)
    assert (one - other).abs().max() > 1e-3 * one.max()


def test_value_norms_of_a_long_stretch_are_made_in_parts(monkeypatch):
    view = make_view(100, heads=3, group=2)
    whole = value_norms(view.values, view.projection)
    monkeypatch.setattr(parts, "_TOKENS_AT_ONCE", 33)
    torch.testing.assert_close(value_norms(view.values, view.projection), whole)
    assert value_norms(view.values[:0], view.projection).shape == (3, 2, 0)


def test_value_norms_are_those_of_the_output_projection():
    """Through the D x D factor of the Gram matrix, without ever projecting to the hidden size."""
    torch.manual_seed(0)
    heads, group, size, hidden = 2, 3, 4, 24
    output = torch.randn(heads, group, size, hidden, dtype=torch.float64)
    factor = torch.linalg.cholesky(output @ output.transpose(-1, -2))
    values = torch.randn(10, heads, size)
    expected = torch.einsum("nhd,hgdo->hgno", values.double(), output).norm(dim=-1)
    torch.testing.assert_close(value_norms(values, factor.float()).double(), expected, rtol=1e-5, atol=1e-6)


def test_sums_over_queries_add_up():
    """What lets the evaluation share out all the prompt's queries over several views."""
    view, options = make_view(30, window=8), ScoreOptions(pool_kernel=3)
    halves = [dataclasses.replace(view, attention=part) for part in view.attention.split(3, dim=2)]
    for name in SCORES:
        if get_score(name).every_query:
            whole = get_score(name)(view, options)
            torch.testing.assert_close(sum(get_score(name)(half, options) for half in halves), whole)
    assert get_score("h2o").every_query


def test_the_first_stage_of_critical_is_snapkv():
    view, options = make_view(30, own=5), ScoreOptions(pool_kernel=3)
    expected = get_score("attention")(view, options)
    assert torch.equal(get_score("critical").first_stage(view, options), expected)
    assert all(get_score(name).first_stage(view, options) is None for name in SCORES if name != "critical")


def test_output_norms_are_made_in_parts(monkeypatch):
    view = make_view(100, heads=3, group=2)
    whole = parts.output_l1_norms(view)
    monkeypatch.setattr(parts, "_TOKENS_AT_ONCE", 33)
    torch.testing.assert_close(parts.output_l1_norms(view), whole)


@pytest.mark.parametrize("name", ["critical", "defensive"])
def test_a_view_without_the_output_projection(name):
    with pytest.raises(ValueError, match="reads_output"):
        get_score(name)(dataclasses.replace(make_view(10), output=None), ScoreOptions())
    assert get_score(name).reads_output


@pytest.mark.parametrize("name", ["laprox", "attention", "attention_value", "cake"])
def test_newest_tokens_are_not_punished(name):
    """Attention that is even over all that a query sees must not fall towards the last tokens."""
    view = make_view(40, window=8, own=8)
    sees = view.attention > 0
    view = dataclasses.replace(view, attention=torch.where(sees, 0.025, 0.0), values=torch.ones_like(view.values))
    score = get_score(name)(view, ScoreOptions(pool_kernel=1))
    torch.testing.assert_close(score, score[:, :1].expand_as(score), rtol=1e-4, atol=0)


def test_random_depends_on_seed_head_and_position_only():
    options = ScoreOptions()
    one = Random()(make_view(500, heads=4, seed=1), options)
    assert torch.equal(one, Random()(make_view(500, heads=4, seed=2), options))
    other = Random(seed=1)(make_view(500, heads=4), options)
    for a, b in [(one, other), (one[0], one[1]), (one[:, :-1], one[:, 1:])]:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.15
    assert 0.4 < one.mean() < 0.6 and one.unique().numel() > 1990


@pytest.mark.parametrize("options", [{"pool_kernel": 4}, {"pool_kernel": 0}, {"gqa": "max"}])
def test_options_that_cannot_work(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ScoreOptions(**options)


@pytest.mark.parametrize("name", SCORES)
def test_never_waits_for_the_device(name):
    """On the meta device reading a number back raises, and so does mixing in a tensor that was left on the CPU."""
    view = make_view(50, own=5)
    fields = {field.name: getattr(view, field.name) for field in dataclasses.fields(view)}
    moved = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
    score = get_score(name)(dataclasses.replace(view, **moved), ScoreOptions())
    assert score.is_meta and score.shape == (2, 50)
