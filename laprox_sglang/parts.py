"""What cache and attention share in one scheduler process: the row view of the pool, the query ring, the kernels.

Made once, by whoever needs it first: the attention backend when CUDA graphs are recorded, which is before SGLang
builds the radix cache, or else the radix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laprox_sglang.attention.base import RaggedAttention, choose
from laprox_sglang.cache.query_ring import QueryRing
from laprox_sglang.cache.rows import RowPool
from laprox_sglang.config import LaProxConfig
from laprox_sglang.model_support import AttentionLayer, find_attention_layers


@dataclass(frozen=True)
class Parts:
    layers: list[AttentionLayer]
    pool: RowPool
    ring: QueryRing
    attention: RaggedAttention


def build(runner: Any, config: LaProxConfig) -> Parts:
    """For SGLang's model runner, once it has model and pool. Raises ValueError for what cannot be served."""
    layers = find_attention_layers(runner.model)
    pool = row_pool(runner.token_to_kv_pool)
    first = layers[0].attention
    expected = (len(layers), first.tp_k_head_num, first.head_dim)
    found = (pool.layers, pool.heads, pool.head_dim)
    if expected != found:
        raise ValueError(f"the KV pool is (layers, heads, dim) {found}, the model {expected}")
    attention = choose(pool.device, config.kernels)
    reason = attention.refusal(first.tp_q_head_num, pool.heads, pool.head_dim, pool.k.dtype)
    if reason is not None:
        raise ValueError(f"--laprox-kernels {attention.name} cannot serve this model: {reason}; use auto")
    ring = QueryRing(
        pool.layers,
        runner.req_to_token_pool.req_to_token.shape[0],
        config.window,
        first.tp_q_head_num,
        pool.head_dim,
        runner.dtype,
        pool.device,
    )
    return Parts(layers, pool, ring, attention)


def row_pool(kv_pool: Any) -> RowPool:
    """The row view of SGLang's KV pool. Raises ValueError when the pool was not made by patches.kv_pool."""
    k, v = getattr(kv_pool, "laprox_k", None), getattr(kv_pool, "laprox_v", None)
    if k is None or v is None:
        raise ValueError(
            f"the KV pool ({type(kv_pool).__name__}) is not one tensor over all layers: laprox needs a plain "
            "MHATokenToKVPool (no MLA, no sliding window, no quantised KV)"
        )
    return RowPool(k, v)
