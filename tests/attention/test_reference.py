"""The oracle itself, against dense attention of torch and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from ragged_cases import SHAPES, make_case

from laprox_sglang.attention import base
from laprox_sglang.attention.base import RaggedBatch
from laprox_sglang.attention.torch_reference import TorchRaggedAttention


def one_request(rows, indptr, slots, tail_start, seq_len, q_len, kv_heads):
    return RaggedBatch.build(
        rows=torch.tensor(rows, dtype=torch.int32),
        indptr=np.array([indptr]),
        slots=torch.tensor([slots], dtype=torch.int32),
        pool_index=[0],
        tail_start=[tail_start],
        seq_len=[seq_len],
        q_len=[q_len],
        num_kv_heads=kv_heads,
    )


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_everything_kept_is_dense_attention(kept):
    """A list that holds a prefix's own rows, shuffled, must not differ from the dense prefix."""
    torch.manual_seed(0)
    layers, pool, heads, group, dim, length, new = 2, 40, 2, 3, 16, 30, 7
    k = torch.randn(layers, pool, heads, dim, dtype=torch.float64)
    v = torch.randn_like(k)
    q = torch.randn(new, heads * group, dim, dtype=torch.float64)
    slots = torch.randperm(pool - 1)[:length] + 1
    lists = [
        (layer * pool + slots[torch.randperm(kept)]) * heads + head for layer in range(layers) for head in range(heads)
    ]
    batch = one_request(torch.cat(lists).tolist(), np.arange(5) * kept, slots.tolist(), kept, length, new, heads)
    for layer in range(layers):
        k_rows, v_rows = k.view(-1, dim), v.view(-1, dim)
        result = TorchRaggedAttention(torch.float64).forward(q, k_rows, v_rows, layer, batch, 0.3)
        keys, values = (pool_[layer, slots].repeat_interleave(group, 1).transpose(0, 1) for pool_ in (k, v))
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(result, expected.transpose(0, 1))


def test_by_hand():
    """Two listed rows and one tail token, one head: weights e^1 : e^2 : e^3 on values 1, 10, 100."""
    k_rows = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    v_rows = torch.tensor([[math.nan], [1.0], [10.0], [100.0]])
    batch = one_request([2, 1], [0, 2], [0, 0, 3], 2, 3, 1, 1)
    attention = TorchRaggedAttention()
    weights = [math.exp(x) for x in (1, 2, 3)]
    expected = (weights[0] + 10 * weights[1] + 100 * weights[2]) / sum(weights)
    result = attention.forward(torch.ones(1, 1, 1), k_rows, v_rows, 0, batch, 1.0)
    assert result.item() == pytest.approx(expected)
    assert attention.lse_of_lists(torch.ones(1, 1, 1, 1), k_rows, 0, batch, 1.0).item() == pytest.approx(
        math.log(math.exp(1) + math.exp(2))
    )
    capped = [math.exp(2 * math.tanh(x / 2)) for x in (1, 2, 3)]
    result = attention.forward(torch.ones(1, 1, 1), k_rows, v_rows, 0, batch, 1.0, logit_cap=2.0)
    assert result.item() == pytest.approx((capped[0] + 10 * capped[1] + 100 * capped[2]) / sum(capped))


def test_lse_of_an_empty_list_is_minus_infinity():
    batch = one_request([], [0, 0], [1], 0, 1, 1, 1)
    lse = TorchRaggedAttention().lse_of_lists(torch.ones(1, 2, 3, 4), torch.ones(2, 4), 0, batch, 1.0)
    assert lse.shape == (1, 2, 3) and (lse == -math.inf).all()


def test_cases_poison_what_must_not_be_read():
    case = make_case(**SHAPES["mixed"])
    wrong_layer = TorchRaggedAttention().forward(case.q, case.k_rows, case.v_rows, 0, case.batch, case.scale)
    assert wrong_layer.isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tail_start=3, seq_len=3), "new tokens are dense"),
        (dict(rows=[4, 99]), "outside the pool"),
        (dict(indptr=[0, 3]), "there are 2 rows"),
        (dict(indptr=[2, 0]), "ascending"),
        (dict(q_len=0), "no new token"),
    ],
)
def test_check_refuses(change, message):
    arguments = dict(rows=[4, 1], indptr=[0, 2], slots=[0, 0, 3], tail_start=2, seq_len=3, q_len=1, kv_heads=1)
    one_request(**arguments).check(torch.zeros(6, 1))
    with pytest.raises(ValueError, match=message):
        one_request(**{**arguments, **change}).check(torch.zeros(6, 1))


def test_registry():
    assert isinstance(base.create("torch"), TorchRaggedAttention)
    assert base.choose("meta").name == "torch"
    with pytest.raises(ValueError, match="choose from cpu, flashinfer, numba"):
        base.create("nonesuch")
