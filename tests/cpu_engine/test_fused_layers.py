"""The fused layers give what SGLang's own torch code gives."""

import pytest
import torch
import torch.nn.functional as F

from laprox_sglang import cpu_engine

cpu_engine.enable()

from laprox_sglang.cpu_engine import fused_layers  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (3, 577), (4, 576), (200, 576)])
@pytest.mark.parametrize("added", [False, True])
def test_rms_norm(dtype, tokens, size, added):
    x, residual = torch.randn(2, tokens, size).to(dtype)
    weight = torch.rand(size).to(dtype)
    total = x.float() + residual.float() if added else x.float()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
    before = x.clone(), residual.clone()
    found = fused_layers.rms_norm(x, residual if added else None, weight, 1e-5)
    out, kept = found if added else (found, None)
    # the order of a sum may turn one rounding
    torch.testing.assert_close(out, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)
    if added:
        torch.testing.assert_close(kept, total.to(dtype), rtol=0, atol=0)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 3072), (60, 3074)])
def test_silu_and_mul(dtype, shape):
    x = (10 * torch.randn(shape)).to(dtype)
    x[0, :4] = torch.tensor([0.0, 100.0, -100.0, -1e4])
    gate, up = x.chunk(2, dim=-1)
    tolerance = {torch.float32: (2e-6, 1e-30), torch.bfloat16: (8e-3, 1e-30)}[dtype]
    torch.testing.assert_close(fused_layers.silu_and_mul(x), F.silu(gate) * up, rtol=tolerance[0], atol=tolerance[1])


def rotated(x, cos, sin, size):
    first, second = x.view(len(x), -1, size).chunk(2, dim=-1)
    cos, sin = (part[:, None].to(x.dtype) for part in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 4, 300])
def test_rotate_equals_separate_calls_bit_for_bit(dtype, table_dtype, tokens):
    if table_dtype != torch.float32 and table_dtype != dtype:
        pytest.skip("SGLang's table is float32 or of the model's dtype")
    size, heads, kv_heads = 64, 9, 3
    table = torch.rand(500, size).to(table_dtype)
    positions = torch.randint(0, 500, (tokens,))
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    query, key, _ = fused.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    cos, sin = table[positions].chunk(2, dim=-1)
    for found, x in zip(fused_layers.rotate(positions, query, key, table, size), (query, key), strict=True):
        assert torch.equal(found, rotated(x.contiguous(), cos, sin, size))


def test_hooks_fall_back_where_a_layer_is_not_plain():
    """Each hook calls SGLang's own code for what the kernel does not do."""

    class Norm:
        variance_size_override, override_orig_dtype = None, None
        cast_x_before_out_mul = fp32_residual = False
        hidden_size, variance_epsilon = 8, 1e-6
        weight = torch.ones(8)

    def original(*arguments):
        return "original"

    norm, silu = fused_layers._norm_hook(original), fused_layers._silu_hook(original)
    plain, x = Norm(), torch.randn(2, 8)
    assert torch.is_tensor(norm(plain, x)) and torch.is_tensor(silu(None, x))
    assert norm(plain, x, None, x) == "original"
    assert norm(plain, x.double()) == "original" and silu(None, x.double()) == "original"
    assert norm(plain, x[:0]) == "original" and silu(None, x[:0]) == "original"
    for name, value in (("variance_size_override", 4), ("cast_x_before_out_mul", True), ("fp32_residual", True)):
        odd = Norm()
        setattr(odd, name, value)
        assert norm(odd, x, x) == "original", name


@pytest.mark.parametrize("position", [500, -1])
def test_a_position_outside_the_table_is_an_error(position):
    """SGLang's own code raises too; reading on would answer with whatever lies behind the table."""
    query, table = torch.randn(2, 64), torch.rand(500, 64)
    with pytest.raises(IndexError, match="position"):
        fused_layers.rotate(torch.tensor([3, position]), query, query, table, 64)
