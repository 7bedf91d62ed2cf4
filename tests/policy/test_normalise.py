from __future__ import annotations

import math

import torch

from laprox_sglang.policy.normalise import layer_normalise


def test_each_layer_sums_to_one_and_keeps_its_proportions():
    scores = torch.rand(3, 2, 50) * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    normalised = layer_normalise(scores)
    torch.testing.assert_close(normalised.sum((1, 2)), torch.ones(3))
    expected = scores.double() / scores.double().sum((1, 2), keepdim=True)
    torch.testing.assert_close(normalised.double(), expected, rtol=1e-5, atol=0)


def test_a_layer_of_zeros_stays_zero():
    scores = torch.rand(2, 2, 5)
    scores[1] = 0
    assert (layer_normalise(scores)[1] == 0).all()


def test_nan_infinity_and_negative():
    scores = torch.ones(3, 1, 4)
    scores[0, 0, 1], scores[1, 0, 2] = math.nan, math.inf
    normalised = layer_normalise(scores)
    assert normalised.isfinite().all()
    torch.testing.assert_close(normalised[0, 0], torch.tensor([1.0, 0.0, 1.0, 1.0]) / 3)
    assert normalised[1, 0].argmax() == 2
    assert (layer_normalise(torch.tensor([[[1.0, -5.0, 1.0, -math.inf]]])) == torch.tensor([0.5, 0, 0.5, 0])).all()
