"""The fused CPU factors equal those that the policy makes from whole tensors."""

import pytest
import torch

from laprox_sglang.attention import cpu_scores
from laprox_sglang.policy.scores.parts import value_norms

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("tokens", [1, 63, 100, 2000])
@pytest.mark.parametrize("first", [0, 1, 40])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_squares(monkeypatch, dtype, threads, tokens, first, listed):
    if first >= tokens:
        pytest.skip("nothing left to score")
    torch.manual_seed(tokens)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # 6 heads of 8 queries: 5 threads share heads
    logits = (5 * torch.randn(2, 3, 8, tokens)).to(dtype)
    logits[:, :, 0, -1] = float("-inf") if tokens > 1 else 0.0
    others = 5 * torch.randn(2, 3, 8) + 3 if listed else None
    if others is not None:
        others[0, 0] = float("-inf")
    total = torch.logsumexp(logits.double(), -1)
    if others is not None:
        total = torch.logaddexp(total, others.double())
    expected = (logits.double() - total[..., None]).exp()[..., first:].square().sum(2)
    found = cpu_scores.FusedFactors(dtype, (2, 3, tokens - first, 8)).column_squares(logits, others, first)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "group", "size"), [(1, 1, 8), (63, 3, 64), (100, 7, 80), (1000, 4, 128)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_norms(monkeypatch, dtype, threads, tokens, group, size):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(group)
    values = torch.randn(tokens, 2, size).to(dtype)
    projection = torch.randn(2, group, size, size)
    factors = projection.transpose(1, 2).reshape(2, size, group * size).to(dtype)
    found = cpu_scores.FusedFactors(dtype, (2, group, tokens, size)).norms(values, factors)
    expected = value_norms(values.double().float(), projection)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=0)
