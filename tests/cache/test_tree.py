"""The tree's decisions one by one, on the same model as the property test."""

from array import array

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from laprox_sglang.config import LaProxConfig
from tests.cache.model import HEADS, LAYERS, TreeModel

CONFIG = LaProxConfig(ratio=0.25, window=4, min_tokens=8, sink=0)


@pytest.fixture
def model():
    made = TreeModel(200, CONFIG)
    yield made
    made.check()


def match(model: TreeModel, tokens: list[int], extra_key=None):
    return model.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key)))


def prefill(model: TreeModel, tokens: list[int], extra_key=None):
    req = model.start(tokens, extra_key)
    model.tree.finish_prefill(req)
    return req


def test_prompt_keeps_its_budget_and_its_window(model):
    req = prefill(model, list(range(44)))
    compressed, window = (node for node, _ in model.tree.path(req.last_node))
    assert compressed.slots_held == 10 and compressed.segment.entries == 10 * LAYERS * HEADS
    assert window.segment is None and window.tokens == 4
    assert model.tree.protected_size() == 14
    row = model.rows.req_to_token[req.kv.req_pool_idx]
    assert (row[:40] == 0).all() and (row[40:44] > 0).all()


def test_page_table_lists_every_entry_and_follows_splits(model):
    req = prefill(model, list(range(44)))
    table = model.tree.path_table(req.last_node)
    assert table.end == 40 and table.host_indptr[-1] == len(table.rows) == 40
    assert model.tree.path_table(req.last_node) is table
    before = sorted(model.pool.k_rows[table.rows.long(), 0].tolist())
    assert match(model, list(range(17))).device_prefix_len == 17
    model.check()
    after = model.tree.path_table(req.last_node)
    assert after is not table
    assert sorted(model.pool.k_rows[after.rows.long(), 0].tolist()) == before


def test_page_table_lists_a_dense_node_between_compressed_ones(model):
    first = prefill(model, list(range(5)))
    model.release(first, checkpoint=True)
    req = prefill(model, list(range(30)))
    table = model.tree.path_table(req.last_node)
    assert table.end == 26
    path = [(node.segment is None, node.tokens) for node, _ in model.tree.path(req.last_node)]
    assert path == [(True, 5), (False, 21), (True, 4)]
    kept = model.tree.path(req.last_node)[1][0].segment.entries
    assert len(table.rows) == 5 * LAYERS * HEADS + kept


def test_no_page_table_without_compression(model):
    req = model.start([1, 2, 3])
    model.tree.checkpoint(req, up_to=3)
    assert model.tree.path_table(req.last_node) is None


def test_a_node_that_another_request_holds_is_compressed_by_the_last_holder(model):
    first = model.start(list(range(30)))
    model.tree.checkpoint(first, up_to=30)
    second = model.start([*range(30), 50, 51])
    model.tree.finish_prefill(first)
    shared = model.tree.path(first.last_node)[0][0]
    assert shared.segment is None and shared.due
    model.release(first, checkpoint=True)
    model.check()
    assert shared.segment is None
    model.release(second, checkpoint=True)
    assert all(node.segment is not None for node in model.tree.nodes() if node.tokens >= CONFIG.min_tokens)


def test_nodes_found_in_the_tree_are_left_as_they_are(model):
    first = model.start([7, 8, 9])
    model.release(first, checkpoint=True)
    second = prefill(model, [7, 8, 9, *range(20, 40)])
    found, own, _ = (node for node, _ in model.tree.path(second.last_node))
    assert found.segment is None and own.segment is not None


def test_short_rests_stay_whole_until_slots_are_needed(model):
    req = prefill(model, list(range(44)))
    model.release(req, checkpoint=True)
    (window,) = [node for node in model.tree.nodes() if node.segment is None]
    assert window.held_back is not None
    nodes = len(model.tree.nodes())
    model.tree.evict(EvictParams(num_tokens=3))
    model.check()
    assert window.segment is not None and window.slots_held == 1
    assert len(model.tree.nodes()) == nodes, "nothing is dropped while shrinking is enough"


def test_a_split_keeps_what_was_held_back(model):
    req = prefill(model, list(range(44)))
    model.release(req, checkpoint=True)
    assert match(model, list(range(42))).device_prefix_len == 42
    model.tree.evict(EvictParams(num_tokens=2))
    model.check()


def test_a_half_that_keeps_nothing_can_be_split_again(model):
    tokens = list(range(7))
    req = model.start(tokens)
    model.release(req, checkpoint=True)
    (node,) = model.tree.nodes()
    assert node.held_back is not None
    # Everything that would be kept lies in the last token, so that the left half keeps nothing.
    positions = torch.full((LAYERS * HEADS,), 6, dtype=torch.int32)
    model.tree.hold_back(node, positions, torch.arange(LAYERS * HEADS + 1))
    everything = frozenset(range(LAYERS * HEADS))
    for length in range(1, 8):
        model.selected[(None, *tokens[:length])] = everything if length == 7 else frozenset()
    for at in (5, 3, 6, 1):
        assert match(model, tokens[:at]).device_prefix_len == at
        model.check()
    model.tree.evict(EvictParams(num_tokens=4))
    model.check()
    assert sum(node.slots_held for node in model.tree.nodes()) <= 3


def test_a_match_ends_before_a_node_that_cannot_be_split(model):
    tight = TreeModel(32, LaProxConfig(ratio=0.5, window=1, min_tokens=2, sink=0), seed=1)
    holder = prefill(tight, list(range(30)))
    while tight.allocator.available_size():
        tight.allocator.alloc(1)
    node = tight.tree.path(holder.last_node)[0][0]
    found = [at for at in range(1, 29) if match_at(tight, at) < at]
    assert node.lock_ref == 1
    # Some splits need a slot that nobody can give; those matches end before the node instead of failing.
    assert found
    starts = {start for _, start in tight.tree.path(holder.last_node)}
    assert all(match_at(tight, at) in starts for at in found)


def match_at(model: TreeModel, at: int) -> int:
    return match(model, list(range(at))).device_prefix_len


def test_a_retracted_request_does_not_compress_its_answer_as_prompt(model):
    req = model.start(list(range(30)))
    req.output_ids = [1, 2, 3]
    model.tree.finish_prefill(req)
    assert all(node.segment is None for node in model.tree.nodes())


def test_namespaces_share_nothing(model):
    prefill(model, list(range(30)))
    assert match(model, list(range(30)), "tenant").device_prefix_len == 0
    prefill(model, list(range(30)), "tenant")
    assert len(model.tree.root_node.children) == 2


def test_a_wrong_selection_is_refused_and_changes_nothing(model):
    model.tree.selector = lambda stretch: (torch.zeros(3, dtype=torch.int32), torch.tensor([0, 3, 3, 3, 3]))
    req = model.start(list(range(44)))
    with pytest.raises(RuntimeError, match="not the budget 40"):
        model.tree.finish_prefill(req)
    assert all(node.segment is None for node in model.tree.nodes())


def test_flush_forgets_everything(model):
    prefill(model, list(range(44)))
    model.running.clear()
    model.tree.reset()
    model.allocator.clear()
    assert model.tree.nodes() == [] and model.tree.stats.segments == 0 and model.tree.requests == {}
