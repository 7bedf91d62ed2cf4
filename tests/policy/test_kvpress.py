"""The same sets as NVIDIA's kvpress 0.5.5 keeps, on the tensors that it saw (``kvpress/make_fixture.py``).

kvpress keeps the window inside the sequence by giving it the best score; here it is protected. Where the two differ,
and why:

* pooling at the first tokens: kvpress divides by the kernel's width as if there were zeros before the prompt, this
  package by the tokens that exist. The test puts the former in place for the comparison.
* PyramidKV: kvpress shares out the window with the rest, as tested here; with protected positions this package takes
  them out first, as the paper's authors do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from laprox_sglang.policy.presets import preset
from laprox_sglang.policy.registry import get_allocation, get_score
from laprox_sglang.policy.scores.base import LayerView, ScoreOptions
from laprox_sglang.policy.select import select

FIXTURE = np.load(Path(__file__).parent / "kvpress" / "kvpress.npz")
CASES = sorted(name for name in FIXTURE.files if "/" in name)


def views() -> list[LayerView]:
    attention = torch.from_numpy(FIXTURE["attention"])
    values, output = torch.from_numpy(FIXTURE["values"]), torch.from_numpy(FIXTURE["output"])
    layers, heads, tokens, size = values.shape
    window = attention.shape[2]
    attention = torch.nn.functional.pad(attention, (0, tokens - attention.shape[-1]))
    attention = attention.view(layers, heads, -1, window, tokens)
    projection = torch.zeros(heads, attention.shape[2], size, size)
    return [
        LayerView(attention[layer], values[layer].transpose(0, 1), projection, None, output=output[layer])
        for layer in range(layers)
    ]


def padded_edge(scores: torch.Tensor, kernel: int) -> torch.Tensor:
    """The first tokens' pooled scores as kvpress has them."""
    half = kernel // 2
    for position in range(half):
        scores[..., position] *= (half + 1 + position) / kernel
    return scores


def ours(name: str, kernel: int, total: int) -> torch.Tensor:
    settings, options = preset(name), ScoreOptions(pool_kernel=kernel)
    score, allocation = get_score(settings["score"]), get_allocation(settings["allocation"])
    scores = torch.stack([score(view, options) for view in views()])
    first = None
    if name in ("criticalkv", "ada-criticalkv"):
        norms = scores / (torch.stack([score.first_stage(view, options) for view in views()]) + score.epsilon)
        first = padded_edge(torch.stack([score.first_stage(view, options) for view in views()]), kernel)
        scores = (first + score.epsilon) * norms
    elif name != "streaming":
        scores = padded_edge(scores, kernel)
    tokens, window = scores.shape[-1], FIXTURE["attention"].shape[2]
    protected = torch.zeros(tokens, dtype=torch.bool)
    if name == "streaming":
        protected[: settings["sink"]] = True
    elif name == "pyramidkv":
        scores[..., -window:] = scores.max() + 1
    else:
        protected[-window:] = True
    found = select(scores, total, allocation, protected, tokens, first=first)
    mask = torch.zeros(scores.shape[0] * scores.shape[1], tokens, dtype=torch.bool)
    lists = torch.arange(mask.shape[0]).repeat_interleave(found.indptr.long().diff())
    mask[lists, found.positions.long()] = True
    return mask.view(scores.shape)


def test_all_asked_methods_are_in_the_fixture():
    names = {case.split("/")[0] for case in CASES}
    assert names == {"snapkv", "ada-snapkv", "pyramidkv", "criticalkv", "ada-criticalkv", "streaming"}


@pytest.mark.parametrize("case", CASES)
def test_same_set_as_kvpress(case):
    name, ratio, kernel = case.split("/")
    expected = torch.from_numpy(FIXTURE[case])
    assert expected.sum() == round(expected.numel() * (1 - float(ratio)))
    found = ours(name, int(kernel), int(expected.sum()))
    assert torch.equal(found, expected), f"{int((found ^ expected).sum())} entries differ"
