"""The tree and the compressor as they run on a GPU, with the kernels in the interpreter."""

import random
from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE, INTERPRETED
from interpreted import pytestmark as interpreter_marks
from torch.utils._python_dispatch import TorchDispatchMode

from laprox_sglang.attention.gpu_scores import GpuScores, select_entries
from laprox_sglang.attention.torch_reference import TorchRaggedAttention
from laprox_sglang.cache import rows as row_views
from laprox_sglang.cache import segment as segments
from laprox_sglang.cache.compressor import Compressor
from laprox_sglang.cache.query_ring import QueryRing
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.cache.tree import Stretch
from laprox_sglang.config import LaProxConfig
from laprox_sglang.kernels import column_scores, pack_rows, page_table, projected_norm, ragged_extend, select
from laprox_sglang.policy.registry import get_allocation
from laprox_sglang.policy.select import select as policy_select
from tests.cache.model import TreeModel
from tests.cache.test_tree_property import STEM, apply

pytestmark = [interpreter_marks, pytest.mark.skipif(not INTERPRETED, reason="drives the GPU's path on a CPU")]
LAYERS, HEADS, GROUP, D, SLOTS, WINDOW = 3, 2, 3, 16, 120, 6


@pytest.fixture(autouse=True)
def gpu_path(monkeypatch):
    monkeypatch.setattr(row_views, "on_gpu", lambda device: True)
    monkeypatch.setattr(pack_rows, "BLOCK", 64)
    monkeypatch.setattr(page_table, "LANES", 1)
    monkeypatch.setattr(page_table, "BLOCK", 64)
    monkeypatch.setattr(select, "BLOCK", 64)
    monkeypatch.setattr(select, "SPAN", 64)
    for module, names in (
        (column_scores, {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_T": 32, "BLOCK_W": 16, "BLOCK_POOL": 64}),
        (projected_norm, {"BLOCK_T": 32}),
        (ragged_extend, {"BLOCK_M": 16, "BLOCK_N": 32}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


def random_steps(generator):
    def prompt():
        rest = [generator.randrange(3) for _ in range(generator.randint(1, 8))]
        return STEM[: generator.randint(0, len(STEM))] + rest

    makers = [
        lambda: ("start", prompt(), None),
        lambda: ("prefilled", generator.randrange(8)),
        lambda: ("decode", generator.randrange(8), generator.randrange(3)),
        lambda: ("finish", generator.randrange(8)),
        lambda: ("match", prompt()),
        lambda: ("evict", generator.randint(1, 12)),
    ]
    return [generator.choice(makers)() for _ in range(40)]


def test_every_entry_has_its_place():
    """The random operations of tests/cache, with packing, splitting and page tables by the kernels."""
    splits = compressions = 0
    for seed in range(3):
        generator = random.Random(seed)
        config = LaProxConfig(ratio=generator.choice([0.01, 0.2, 0.5, 0.9]), window=2, min_tokens=3, sink=1)
        model = TreeModel(generator.randint(16, 60), config, seed)
        for step in random_steps(generator):
            apply(model, step)
            model.check()
            for req in model.running:
                model.tree.path_table(req.last_node)
        splits += model.tree.stats.splits
        compressions += model.tree.stats.compressions
    assert splits > 3 and compressions > 10


def make_world(score="laprox", gqa="mean_attention", cap=0.0, dtype=torch.float32):
    """(compressor, stretch): a path of a dense node, a segment, and the dense node to compress with its window."""
    torch.manual_seed(0)
    pool = RowPool(*(torch.randn(LAYERS, SLOTS + 1, HEADS, D).to(dtype) for _ in range(2)))
    ring = QueryRing(LAYERS, 3, WINDOW, HEADS * GROUP, D, dtype, "cpu")
    ring.buffer.normal_()
    slots = 1 + torch.randperm(SLOTS)
    positions, indptr = policy_select(
        torch.rand(LAYERS, HEADS, 20), 5 * LAYERS * HEADS, get_allocation("model"), torch.zeros(20).bool(), 20
    ).__dict__.values()
    segment, _ = segments.pack(pool, slots[10:30], positions, indptr)
    lengths = (10, 20, 50, WINDOW)
    values = slots[: sum(lengths)].split(lengths)
    nodes = [SimpleNamespace(segment=None, tokens=len(value), value=value) for value in values]
    nodes[1].segment = segment
    starts = (0, 10, 30, 80)
    tree = SimpleNamespace(
        path=lambda node: list(zip(nodes, starts, strict=True)),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(3, 200, dtype=torch.int32)),
    )
    config = LaProxConfig(score=score, gqa=gqa, window=WINDOW, pool_kernel=5, min_tokens=WINDOW)
    projection = torch.randn(LAYERS, HEADS, GROUP, D, D)
    scales, caps = [0.3, 0.3, 0.2], [0.0, cap, cap]
    compressor = Compressor(config, pool, ring, TorchRaggedAttention(), projection, scales, caps)
    compressor.tree = tree
    req = SimpleNamespace(last_node=None, kv=SimpleNamespace(req_pool_idx=1), rid="r")
    end = 80 + WINDOW
    return compressor, Stretch(req, nodes[2], 30, end, 30, 20 * LAYERS * HEADS)


@pytest.mark.parametrize(
    ("gqa", "cap", "factor_bytes"),
    [("mean_attention", 0.0, 1), ("mean_attention", 4.0, 1 << 20), ("mean_score", 0.0, 1 << 20)],
)
def test_the_compressor_scores_as_in_torch(monkeypatch, gqa, cap, factor_bytes):
    """All layers in few launches, layers of different scale, older segments in the softmax: the same scores."""
    monkeypatch.setattr("laprox_sglang.attention.gpu_scores.FACTOR_BYTES", factor_bytes)
    compressor, stretch = make_world(gqa=gqa, cap=cap)
    scored = compressor.scores(stretch)
    found, tokens = scored.scores, scored.tokens
    assert compressor.kernels is not None and tokens == 50 and found.shape == (LAYERS, HEADS, 50 + WINDOW)
    compressor.kernels = None
    expected = compressor.scores(stretch).scores
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_other_scores_take_the_torch_path():
    compressor, stretch = make_world(score="attention")
    found = compressor.scores(stretch).scores
    compressor.kernels = None
    assert torch.equal(found, compressor.scores(stretch).scores)


@pytest.mark.parametrize("allocation", ["model", "model_raw", "layer"])
def test_the_segment_is_that_of_the_torch_path(monkeypatch, allocation):
    """Selected and packed by the kernels, and by policy and tree in torch: the same bits everywhere."""
    compressor, stretch = make_world()
    scored = compressor.scores(stretch)
    scores, tokens = scored.scores, scored.tokens
    scores[:, :, ::7] = scores[0, 0, 3]  # ties
    protected = torch.zeros(scores.shape[2], dtype=torch.bool)
    protected[:4] = True
    chosen = get_allocation(allocation)
    results = []
    for kernels in (True, False):
        monkeypatch.setattr(row_views, "on_gpu", lambda device, kernels=kernels: kernels)
        pool = RowPool(compressor.pool.k.clone(), compressor.pool.v.clone())
        choose = select_entries if kernels else policy_select
        selection = choose(scores, stretch.budget, chosen, protected, tokens)
        segment, freed = segments.pack(pool, stretch.node.value, selection.positions, selection.indptr)
        extra = freed[:1] if segments.split_needs(pool, segment, 23) else None
        halves = segments.split(pool, segment, 23, extra)
        again = segments.split(pool, halves[1], 9, freed[1:2])
        tensors = [selection.positions, selection.indptr, freed, pool.k, pool.v, halves[2], again[2]]
        for each in (segment, *halves[:2], *again[:2]):
            tensors += [each.slots, each.row_ids, each.indptr, each.positions]
            tensors.append(torch.tensor([each.tokens, each.entries, each.entries_before(min(5, each.tokens))]))
        results.append(tensors)
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


class NothingWaits(TorchDispatchMode):
    """Refuses the operations that must read device memory on the host, because a size or a branch depends on it."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "repeat_interleave.T")

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function).removeprefix("aten.")
        assert not name.startswith(self.waiting), f"{name} waits for the device"
        if name.startswith("index.Tensor"):
            assert all(index is None or index.dtype != torch.bool for index in arguments[1]), "a mask as an index waits"
        return function(*arguments, **(keywords or {}))


def test_compression_waits_for_nothing():
    compressor, stretch = make_world()
    with NothingWaits():
        positions, indptr = compressor(stretch)
        segment, freed = segments.pack(compressor.pool, stretch.node.value, positions, indptr)
        segments.concatenate(LAYERS * HEADS, [(segment.row_ids, segment.indptr)] * 2, torch.device(DEVICE))
        segments.split(compressor.pool, segment, 30, freed[:1])
    with pytest.raises(AssertionError, match="waits"), NothingWaits():
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]


def test_warm_up():
    """Runs on the padding slot alone."""
    compressor, _ = make_world()
    before = compressor.pool.k.clone()
    compressor.warm_up()
    assert torch.equal(before[:, 1:], compressor.pool.k[:, 1:])
    assert isinstance(compressor.kernels, GpuScores) and len(compressor.kernels.runs) == 2
