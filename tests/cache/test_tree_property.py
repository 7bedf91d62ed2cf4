"""Random insert, match inside a compressed node, split, compress, lock and evict, against a plain model."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from laprox_sglang.config import LaProxConfig
from tests.cache.model import TreeModel

# Few different tokens and long common beginnings, so that most paths share and most matches end inside a node.
STEM = [0, 1, 0, 0, 1, 1, 0, 1, 2, 0, 1, 0]
prompts = st.builds(
    lambda common, rest: STEM[:common] + rest,
    st.integers(0, len(STEM)),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
)
operations = st.one_of(
    st.tuples(st.just("start"), prompts, st.sampled_from([None, None, None, "tenant"])),
    st.tuples(st.just("start"), prompts, st.none()),
    st.tuples(st.just("prefilled"), st.integers(0, 7)),
    st.tuples(st.just("decode"), st.integers(0, 7), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(0, 7)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("match"), prompts),
    st.tuples(st.just("evict"), st.integers(1, 12)),
)
configs = st.builds(
    lambda ratio, window, extra: LaProxConfig(ratio=ratio, window=window, min_tokens=window + extra, sink=1),
    st.sampled_from([0.01, 0.2, 0.5, 0.9, 1.0]),
    st.integers(1, 3),
    st.integers(0, 4),
)


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    slots=st.integers(16, 60),
    config=configs,
    policy=st.sampled_from(["lru", "lfu", "fifo", "mru", "filo", "priority"]),
    seed=st.integers(0, 1000),
    steps=st.lists(operations, min_size=6, max_size=40),
)
def test_every_slot_has_one_owner_and_every_entry_its_place(slots, config, policy, seed, steps):
    torch.set_num_threads(1)
    model = TreeModel(slots, config, seed, policy)
    for step in steps:
        apply(model, step)
        model.check()
    for req in list(model.running):
        model.release(req, checkpoint=True)
    model.check()
    assert model.tree.protected_size() == 0
    model.tree.evict(EvictParams(num_tokens=10**6))
    model.check()
    assert model.allocator.available_size() == slots, "everything can be evicted and its slots are really free"


def apply(model, step):
    name, *arguments = step
    if name == "start":
        model.start(*arguments)
    elif name == "match":
        model.tree.match_prefix(MatchPrefixParams(key=RadixKey(_array(arguments[0]))))
    elif name == "evict":
        model.tree.evict(EvictParams(num_tokens=arguments[0]))
    elif model.running:
        req = model.running[arguments[0] % len(model.running)]
        if name == "prefilled":
            model.tree.finish_prefill(req)
        elif name == "decode":
            model.decode(req, arguments[1])
        else:
            model.release(req, checkpoint=name == "finish")


def _array(tokens):
    from array import array

    return array("q", tokens)
