"""Allocates the KV pool as one tensor over all layers, and hands SGLang its per-layer views.

Stock allocates one buffer per layer. With one tensor, any row of any slot can store an entry of any layer (see
``cache.rows``), and every stock kernel works on the views unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from laprox_sglang.config import BACKEND_NAME

TARGET = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
TYPE = "around"
PARAMETERS = ("self",)


def hook(original: Callable[..., None], pool: Any) -> None:
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
    from sglang.srt.runtime_context import get_memory

    if get_memory().radix_cache_backend != BACKEND_NAME:
        original(pool)
        return
    k_shape, v_shape = pool._kv_buffer_shapes()
    if pool.kv_cache_layout != "nhd" or k_shape != v_shape or pool.page_size != 1:
        raise ValueError(
            f"laprox needs K and V of one shape, token-major, page size 1; found {pool.kv_cache_layout}, {k_shape}, "
            f"{v_shape}, page size {pool.page_size}"
        )
    with pool.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
        shape = (pool.layer_num, *k_shape)
        pool.laprox_k = torch.zeros(shape, dtype=pool.store_dtype, device=pool.device)
        pool.laprox_v = torch.zeros(shape, dtype=pool.store_dtype, device=pool.device)
    pool.k_buffer = list(pool.laprox_k.unbind(0))
    pool.v_buffer = list(pool.laprox_v.unbind(0))
