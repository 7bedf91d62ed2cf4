"""Replays of recorded decode steps, on a CPU: run by ``test_graphs.py`` with Triton's interpreter.

A CUDA graph is the launches of one step with their addresses. So here the step's layers are called again with the very
tensors that they were recorded with, after SGLang's part of a replay (its static buffers) and ours (the metadata). The
result must be what an eager step over the same requests gives.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode

from laprox_sglang.attention import backend as backends
from laprox_sglang.attention import graph_variants
from laprox_sglang.attention.backend import BatchPaths, LaProxAttentionBackend
from laprox_sglang.attention.base import create
from laprox_sglang.cache.node import PathTable
from laprox_sglang.cache.query_ring import QueryRing
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.kernels import ragged_decode
from laprox_sglang.parts import Parts

LAYERS, HEADS, GROUP, D, SLOTS, REQUESTS, CONTEXT, RECORDED = 2, 2, 3, 16, 400, 6, 120, 4
LISTS = LAYERS * HEADS


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    for name in ("LEAST_SPLIT", "BLOCK_N"):
        monkeypatch.setattr(ragged_decode, name, 32)


class Stock:
    """Says what it was asked."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **options: self.calls.append(name)


class World:
    """A pool, req_to_token, SGLang's static buffers, and a backend whose steps of RECORDED requests are recorded."""

    def __init__(self):
        torch.manual_seed(0)
        k, v = (torch.randn(LAYERS, SLOTS, HEADS, D) for _ in range(2))
        self.pool = RowPool(k, v)
        slots = 1 + torch.randperm(SLOTS - 1)
        self.req_to_token = slots[torch.randint(SLOTS - 1, (REQUESTS, CONTEXT))].to(torch.int32)
        self.req_to_token[0] = 0
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token), token_to_kv_pool=None
        )
        ring = QueryRing(LAYERS, REQUESTS, 8, HEADS * GROUP, D, torch.float32, "cpu")
        self.parts = Parts([], self.pool, ring, create("triton"))
        self.backend = LaProxAttentionBackend(runner, lambda: self.parts)
        self.backend.stock = Stock()
        self.backend.init_cuda_graph_state(RECORDED, RECORDED)
        self.pool_index = torch.zeros(RECORDED, dtype=torch.int64)
        self.seq_lens = torch.ones(RECORDED, dtype=torch.int64)
        self.recorded = {label: self.record(label) for label in graph_variants.DenseOrCompressed.capture_labels}

    def view(self):
        return SimpleNamespace(
            batch_size=RECORDED,
            req_pool_indices=self.pool_index,
            seq_lens=self.seq_lens,
            forward_mode=ForwardMode.DECODE,
        )

    def record(self, label):
        """What a graph holds: the batch and ring plan of capture time, and the in-graph preparation."""
        capture_mode._set_capture_attention_variant(label)
        view = self.view()
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        capture_mode._set_capture_attention_variant(None)
        batch, plan = self.backend._batch, self.backend._plan
        self.backend.init_forward_metadata_in_graph(view)

        def in_graph():
            self.backend._batch, self.backend._plan = batch, plan
            self.backend.init_forward_metadata_in_graph(view)

        return SimpleNamespace(batch=batch, plan=plan, in_graph=in_graph)

    def table(self, longest, end):
        """A path's table with lists of up to ``longest`` rows."""
        lengths = torch.randint(0, longest + 1, (LISTS,))
        lengths[0], lengths[-1] = longest, 0
        rows = torch.randint(HEADS, self.pool.k_rows.shape[0], (int(lengths.sum()),), dtype=torch.int32)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return PathTable(rows, indptr, end, (), 0)

    def replay(self, tables, pool_rows, seq_lens):
        """The recorded attention [RECORDED, Hq, D] of each layer, and where the queries went."""
        variants = graph_variants.DenseOrCompressed(lambda: self.backend.next_is_compressed)
        self.backend.announce(BatchPaths(tables, pool_rows))
        label = variants.select(None)
        size = len(tables)
        self.pool_index.zero_()[:size] = torch.tensor(pool_rows)
        self.seq_lens.fill_(1)[:size] = torch.tensor(seq_lens)
        self.backend.init_forward_metadata_out_graph(self.view())
        recorded = self.recorded[label]
        recorded.in_graph()
        q = torch.randn(RECORDED, HEADS * GROUP, D)
        outs = None
        if recorded.batch is not None:
            outs = [self.attend(self.parts.attention, q, recorded.batch, layer) for layer in range(LAYERS)]
        return label, q, outs, recorded.plan.target.clone()

    def eager(self, tables, pool_rows, seq_lens):
        self.backend.announce(BatchPaths(tables, pool_rows))
        self.backend.init_forward_metadata(
            SimpleNamespace(
                batch_size=len(tables),
                req_pool_indices=torch.tensor(pool_rows),
                seq_lens=torch.tensor(seq_lens),
                seq_lens_cpu=torch.tensor(seq_lens),
                forward_mode=ForwardMode.DECODE,
            )
        )
        return self.backend._batch, self.backend._plan

    def attend(self, attention, q, batch, layer):
        return attention.forward(q, self.pool.k_rows, self.pool.v_rows, layer, batch, D**-0.5)

    def check(self, tables, pool_rows, seq_lens):
        label, q, outs, targets = self.replay(tables, pool_rows, seq_lens)
        batch, plan = self.eager(tables, pool_rows, seq_lens)
        size = len(tables)
        assert torch.equal(targets[:size], plan.target) and (targets[size:] == 0).all()
        compressed = any(table is not None for table in tables)
        assert label == (graph_variants.COMPRESSED if compressed else graph_variants.DENSE)
        if not compressed:
            assert batch is None
            return
        for layer, out in enumerate(outs):
            expected = self.attend(create("torch"), q[:size], batch, layer)
            torch.testing.assert_close(out[:size], expected, rtol=1e-5, atol=1e-5)
            assert out.isfinite().all()


@pytest.fixture(scope="module")
def world():
    return World()


def test_lists_shorter_and_longer_than_when_recorded(world):
    for longest in (1, 90, 5):
        world.check([world.table(longest, 60) for _ in range(4)], [3, 1, 2, 5], [61, 70, 99, 120])


def test_a_step_after_another_only_grows(world):
    tables = [world.table(30, 20), None, world.table(7, 50)]
    world.check(tables, [2, 4, 1], [30, 33, 60])
    before = world.backend._static.indptr.clone()
    world.check(tables, [2, 4, 1], [31, 34, 61])
    assert torch.equal(world.backend._static.indptr, before)


def test_padding_is_empty_after_a_fuller_step(world):
    full = [world.table(20, 30) for _ in range(4)]
    world.check(full, [1, 2, 3, 4], [40, 41, 42, 43])
    world.check(full[1:3], [2, 3], [42, 43])
    static = world.backend._static
    assert (static.indptr[2:] == 0).all() and (static.tail_start[2:] == 0).all()


def test_dense_and_compressed_steps_in_turn(world):
    tables = [world.table(25, 10), None]
    for step in range(3):
        world.backend.stock.calls.clear()
        world.check([None, None], [3, 5], [50 + step, 60 + step])
        assert world.backend.stock.calls.count("init_forward_metadata_out_graph") == 1
        world.backend.stock.calls.clear()
        world.check(tables, [3, 5], [50 + step, 60 + step])
        assert world.backend.stock.calls == []


def test_requests_that_share_a_table_and_tables_that_changed(world):
    shared = world.table(33, 40)
    world.check([shared, shared, None, shared], [1, 2, 3, 4], [50, 55, 60, 65])
    # A tree that changed elsewhere makes a new table of the same rows; one that changed here makes other rows.
    world.check([shared.at(7), world.table(60, 40), None, shared.at(7)], [1, 2, 3, 4], [51, 56, 61, 66])


def test_random_batches(world):
    draw = random.Random(5)
    tables = [None, None, *(world.table(draw.choice([0, 1, 30, 90]), draw.randint(1, 40)) for _ in range(5))]
    for _ in range(3):
        size = draw.randint(1, RECORDED)
        rows = draw.sample(range(1, REQUESTS), size)
        world.check(draw.choices(tables, k=size), rows, [draw.randint(41, CONTEXT) for _ in rows])


def test_table_rows_live_as_long_as_a_replay_may_read_them(world):
    table = world.table(20, 30)
    world.check([table], [1], [40])
    address = table.rows.data_ptr()
    del table
    assert world.backend._static._filled[0].rows.data_ptr() == address


def test_no_host_number_is_read_from_a_static_batch(world):
    batch = world.recorded[graph_variants.COMPRESSED].batch
    for name in ("seq_len_host", "tail_start_host", "q_start_host"):
        assert getattr(batch, name).size == 0
    assert world.parts.attention.recordable and not world.parts.attention.needs_host_lists


def test_shared_reads_end_with_the_forward(world):
    assert world.backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    assert world.backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN


def test_the_variants_reach_the_decode_runner(world):
    """The name that the runner's constructor calls gives ours."""
    import sglang.srt.managers.scheduler  # noqa: F401 - engine hooks are installed where it is
    import sglang.srt.model_executor.runner.decode_cuda_graph_runner as runner
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert backends.current() is world.backend
    variants = runner.create_attention_graph_variants(SimpleNamespace())
    assert variants.capture_labels == (graph_variants.DENSE, graph_variants.COMPRESSED)
    world.backend.announce(BatchPaths([None, world.table(3, 5)], [1, 2]))
    assert variants.select(None) == graph_variants.COMPRESSED
    world.backend.announce(None)
    assert variants.select(None) == graph_variants.DENSE


def test_kernels_that_cannot_be_recorded_are_refused(monkeypatch):
    other = World()
    other.backend.parts = Parts([], other.pool, other.parts.ring, create("torch"))
    with pytest.raises(ValueError, match="cannot be recorded in CUDA graphs; use triton"):
        other.backend.init_cuda_graph_state(2, 2)
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with pytest.raises(ValueError, match="SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        World()


def test_numbers_of_a_batch_are_int64(world):
    """The kernels multiply them by strides."""
    batch = world.recorded[graph_variants.COMPRESSED].batch
    assert {each.dtype for each in (batch.indptr, batch.pool_index, batch.tail_start, batch.seq_len)} == {torch.int64}
