from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from naive import naive_keep, naive_proportional, naive_pyramid
from policies import ALLOCATIONS, keep, make_view

from laprox_sglang.policy.allocations.profile import Profile, ProfileError, read_profile
from laprox_sglang.policy.allocations.proportional import proportional_shares
from laprox_sglang.policy.allocations.pyramid import arithmetic_shares
from laprox_sglang.policy.registry import get_allocation

SHAPES = [(1, 1, 1), (2, 3, 63), (3, 1, 7), (5, 2, 100), (4, 7, 5)]


def random_scores(shape, kind="distinct"):
    generator = torch.Generator().manual_seed(sum(shape))
    scores = torch.rand(shape, generator=generator)
    # layers and heads of unlike size, so that the allocations differ
    scores = scores * torch.logspace(0, 2, shape[0]).view(-1, 1, 1) * torch.logspace(0, 1, shape[1]).view(1, -1, 1)
    if kind == "ties":
        scores = scores.clamp(max=4).floor()
    elif kind == "broken":
        scores[torch.rand(shape, generator=generator) < 0.3] = math.nan
        scores[torch.rand(shape, generator=generator) < 0.1] = math.inf
    return scores


def protect(tokens, *positions):
    protected = torch.zeros(tokens, dtype=torch.bool)
    for position in positions:
        protected[min(position, tokens - 1)] = True
    return protected


def totals_of(shape, protected):
    entries = math.prod(shape)
    reserved = int(protected.sum()) * shape[0] * shape[1]
    wanted = {
        0,
        1,
        reserved - 1,
        reserved,
        reserved + 1,
        entries // 7,
        entries // 2,
        entries - 1,
        entries,
        entries + 10,
    }
    return sorted(total for total in wanted if total >= 0)


def as_set(mask):
    return {(position, layer, head) for layer, head, position in mask.nonzero().tolist()}


@pytest.mark.parametrize("kind", ["distinct", "ties", "broken"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_against_brute_force(name, shape, kind):
    scores = random_scores(shape, kind)
    for protected in (protect(shape[2]), protect(shape[2], 0, 1, shape[2] - 2)):
        for total in totals_of(shape, protected):
            mask = keep(name, scores, total, protected)
            assert mask.shape == shape and mask.dtype == torch.bool
            assert int(mask.sum()) == min(total, scores.numel()), total
            assert as_set(mask) == naive_keep(name, scores, total, protected), total


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_protected_positions_stay_where_the_total_allows(name):
    scores = random_scores((3, 2, 40))
    scores[:, :, 7] = 0
    protected = protect(40, 7, 30)
    for total in (12, 13, 60, 200):
        assert keep(name, scores, total, protected)[:, :, [7, 30]].all(), total
    short = keep(name, scores, 11, protected)
    assert short[:, :, [7, 30]].sum() == 11


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_equal_scores_go_by_position_layer_head(name):
    kept = as_set(keep(name, torch.ones(2, 2, 6), 6, protect(6)))
    expected = {
        "model": {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)},
        "model_raw": {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)},
        "layer": {(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (0, 1, 1), (1, 1, 0)},
        "head": {(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (0, 1, 1)},
        "pyramid": {(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0)},
        "layer_pyramid": {(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (2, 0, 0), (0, 1, 0)},
        # layer weights 2.8 and 0: all to the first layer, as far as it reaches
        "cake": {(position, 0, head) for position in range(3) for head in range(2)},
        # shares 1, 8, 5.2, 1 and the base: 0.58, 2.88, 1.96, 0.58 entries
        "profile": {(0, 0, 0), (0, 0, 1), (1, 0, 1), (2, 0, 1), (0, 1, 0), (1, 1, 0)},
    }
    assert kept == expected[name]


def test_model_may_leave_a_head_with_nothing():
    scores = torch.rand(2, 2, 50) + 1
    scores[1, 0] = 0
    assert keep("model", scores, 100, protect(50))[1, 0].sum() == 0


def test_layer_safeguard():
    """A head that would get nothing by its scores keeps a fifth of its share, and the total stays exact."""
    scores = torch.rand(2, 4, 100) + 1
    scores[:, 2] = torch.rand(2, 100) / 1000
    mask = keep("layer", scores, 400, protect(100))
    assert mask.sum((1, 2)).tolist() == [200, 200]
    assert mask[:, 2].sum(1).tolist() == [10, 10]
    best = scores[:, 2].topk(10).indices
    assert mask[:, 2].gather(1, best).all()


def test_head_is_uniform_with_the_remainder_first():
    mask = keep("head", torch.rand(2, 3, 30), 2 * 3 * 10 + 4, protect(30))
    assert mask.sum(2).tolist() == [[11, 11, 11], [11, 10, 10]]


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_nan_is_worth_nothing(name):
    scores = torch.rand(2, 2, 20) + 1
    scores[:, :, ::2] = math.nan
    mask = keep(name, scores, 20, protect(20))
    assert mask.sum() == 20 and not mask[:, :, ::2].any()


@pytest.mark.parametrize("room", [50, 51, 400])
@pytest.mark.parametrize("layers", [1, 2, 3, 30])
def test_arithmetic_shares(layers, room):
    for total in (0, 1, layers, 7 * layers + 1, 40 * layers, layers * room - 1, layers * room):
        if total <= layers * room:
            shares = arithmetic_shares(torch.tensor(total), layers, torch.tensor(room), 20).tolist()
            assert sum(shares) == total
            assert all(0 <= after <= before <= room for before, after in pairwise(shares))
            assert shares == naive_pyramid(total, layers, room, 20)


def test_pyramid_falls():
    per_layer = keep("pyramid", torch.rand(5, 2, 1000), 2000, protect(1000)).sum((1, 2)).tolist()
    assert per_layer == [780, 590, 400, 210, 20]


@pytest.mark.parametrize("room", [3, 10, 1000])
@pytest.mark.parametrize("weights", [[1.0], [5, 1, 0, 3.3], [0, 0, 0], [1e-30, 1e30, math.nan, 2], list(range(1, 33))])
def test_proportional_shares(weights, room):
    weights = torch.tensor(weights, dtype=torch.float64)
    for total in {0, 1, 2, 7, len(weights) * room - 1, len(weights) * room, len(weights) * room // 2}:
        if total <= len(weights) * room:
            shares = proportional_shares(torch.tensor(total), weights, torch.tensor(room)).tolist()
            assert sum(shares) == total and all(0 <= share <= room for share in shares)
            assert shares == naive_proportional(total, weights.tolist(), room)


def test_proportional_shares_follow_the_weights():
    shares = proportional_shares(torch.tensor(100), torch.tensor([1.0, 2, 7]), torch.tensor(1000))
    assert shares.tolist() == [10, 20, 70]
    # what the third cannot take goes to the others, one to two
    shares = proportional_shares(torch.tensor(100), torch.tensor([1.0, 2, 7]), torch.tensor(55))
    assert shares.tolist() == [15, 30, 55]


def test_cake_weighs_entropy_and_change():
    """By hand: two queries that look at the same token weigh nothing; two that look at different ones do."""
    same = torch.zeros(1, 1, 2, 4)
    same[..., 1] = 1
    other = torch.tensor([[[[0.5, 0.5, 0, 0], [0, 0.25, 0.75, 0]]]])
    cake = get_allocation("cake")
    view = make_view(4, heads=1, group=1, window=2)
    weigh = [float(cake.layer_weight(dataclasses.replace(view, attention=a, visible=None), 4)) for a in (same, other)]
    entropy = math.log(2) - 0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    variance = (0.5**2 + 0.25**2 + 0.75**2) / 2
    assert weigh[0] == 0 and weigh[1] == pytest.approx(entropy ** (1 / 1.6) * variance ** (1 / 0.6), rel=1e-5)


def test_cake_needs_its_weights():
    with pytest.raises(ValueError, match="layer_weight"):
        get_allocation("cake").keep(torch.rand(2, 2, 5), 3, protect(5))


def test_profile_of_another_model_and_broken_files(tmp_path):
    with pytest.raises(ProfileError, match=r"3 layers of 2 KV heads, the model has 2 of 2"):
        Profile(torch.ones(3, 2)).keep(torch.rand(2, 2, 5), 3, protect(5))
    with pytest.raises(ProfileError, match="at least 0"):
        Profile(torch.tensor([[1.0, -1.0]]))
    file = tmp_path / "profile.json"
    for text in ("{", '{"shares": "no"}', '{"other": 1}'):
        file.write_text(text)
        with pytest.raises(ProfileError, match="laprox-sglang profile"):
            read_profile(file)
    with pytest.raises(ProfileError, match="laprox-sglang profile"):
        get_allocation("profile", str(tmp_path / "none.json"))
    with pytest.raises(ProfileError, match="needs a file"):
        get_allocation("profile")
    file.write_text('{"shares": [[1, 2], [3, 4]]}')
    assert get_allocation("profile", str(file)).shares.tolist() == [[1, 2], [3, 4]]
