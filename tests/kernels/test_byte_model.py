"""The byte model against numbers from elsewhere: published sizes, and sums worked out by hand."""

from pathlib import Path

import pytest

from laprox_sglang.kernels import byte_model, shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Llama-3.1-8B", 8_030_261_248), ("Qwen3-8B", 8_190_735_360), ("Qwen3-30B-A3B", 30_532_122_624)],
)
def test_shapes_have_the_published_number_of_parameters(name, parameters):
    assert shapes.MODELS[name].parameters == parameters


def test_experts_reached_by_a_batch():
    shape = shapes.QWEN3_30B_A3B
    per_expert = shape.layers * shape.expert_weights
    alone, many = shape.weights_read(1), shape.weights_read(10_000)
    assert 3.0e9 < alone < 3.3e9  # the "A3B" of its name, without the input embedding
    assert many - alone == pytest.approx(120 * per_expert + 9_999 * shape.hidden)
    assert shape.weights_read(2) - alone - shape.hidden == pytest.approx(7.5 * per_expert)


def test_a_small_case_by_hand():
    shape = shapes.ModelShape("small", 2, 16, 4, 2, 8, 32, 100)
    dense = byte_model.dense_step(shape, 3, 1000)
    assert dense["keys and values"] == 3 * 1000 * 2 * 2 * (2 * 8 * 2)
    assert dense["slot numbers"] == 3 * 1000 * 2 * 8
    assert dense["partial results"] == 2 * 8 * (3 * 2 * 4 * (8 + 1) * 4)
    compressed = byte_model.compressed_step(shape, 3, 1000, 0.1, 100)
    assert compressed["keys and values"] == pytest.approx(3 * 2 * 2 * (90 + 100) * (2 * 8 * 2))
    assert compressed["partial results"] == 2 * 1 * (3 * 2 * 4 * (8 + 1) * 4)
    longer = byte_model.compressed_step(shape, 3, 100_000, 0.1, 100)
    assert longer["partial results"] == 40 * compressed["partial results"]  # 10,090 entries in pieces of 256
    assert compressed["row ids"] == pytest.approx(3 * 2 * 2 * 90 * 4)
    assert compressed["weights"] == dense["weights"] == 2 * shape.weights_read(3)
    assert byte_model.bound(dense, dense) == 1.0


def test_the_bound_for_8b_at_128k():
    """Weights and keys and values alone, by hand: 15.01 GB and 17.18 GB a request."""
    expected = {1: 2.03, 2: 2.95, 4: 4.54, 8: 6.97}
    for batch, by_hand in expected.items():
        shape = shapes.LLAMA_3_1_8B
        dense = byte_model.dense_step(shape, batch, 131072)
        compressed = byte_model.compressed_step(shape, batch, 131072, 0.05, 32)
        assert byte_model.bound(dense, compressed) == pytest.approx(by_hand, rel=0.03)


def test_the_page_is_what_the_model_computes():
    page = Path(byte_model.__file__).with_name("bytes.md")
    assert page.read_text() == byte_model.markdown(), (
        "run python -m laprox_sglang.kernels.byte_model > kernels/bytes.md"
    )
