"""Joins the parts in the scheduler process: pool, tree, query ring, compressor and attention backend of one rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_parallel

from laprox_sglang.attention.backend import BatchPaths, LaProxAttentionBackend
from laprox_sglang.cache.compressor import Compressor
from laprox_sglang.cache.laprox_cache import LaProxRadixCache
from laprox_sglang.cache.output_projection import effective_weight, gram_factors
from laprox_sglang.config import LaProxConfig
from laprox_sglang.observe.answers import Observer
from laprox_sglang.policy.registry import get_score
from laprox_sglang.refused import REFUSED_MODES

logger = logging.getLogger(__name__)

# SGLang runs one scheduler per process.
_runtime: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process; None in a server without our cache."""
    return _runtime


class Runtime:
    """Built by the radix cache factory, when model, pool and attention backend exist.

    Raises ValueError (with the remedy) when a part is not in place or the model cannot be compressed.
    """

    def __init__(self, ctx: TreeCacheBuildContext, config: LaProxConfig):
        runner = ctx.tp_worker.model_runner
        backend = runner.attn_backend
        if not isinstance(backend, LaProxAttentionBackend):
            raise ValueError(
                "--radix-cache-backend laprox needs --attention-backend laprox; "
                f"the server runs {type(backend).__name__}"
            )
        if ctx.is_hybrid_swa or ctx.is_hybrid_ssm or ctx.is_dsa:
            raise ValueError("laprox needs a model whose layers all have full attention; serve it without laprox")
        parts = backend.prepare()
        layers, attention = parts.layers, parts.attention
        self.config = config
        self.layers = layers
        self.dtype = runner.dtype
        # Called with each batch before it runs (by the evaluation).
        self.batch_observer: Callable[[Any], None] | None = None
        self.pool, self.ring = parts.pool, parts.ring
        self.compressor = Compressor(
            config,
            self.pool,
            self.ring,
            attention,
            torch.stack([gram_factors(weight, self.pool.heads) for weight in self._effective_weights()]),
            [each.attention.scaling for each in layers],
            [float(each.attention.logit_cap or 0) for each in layers],
            self.output_weights() if get_score(config.score).reads_output else None,
        )
        self.tree = LaProxRadixCache(ctx.params, self.pool, config, self.compressor)
        self.compressor.tree = self.tree
        self.observer = Observer(self, get_parallel().dp_rank or 0, getattr(runner, "forward_stream", None))
        self.backend = backend
        group = layers[0].attention.tp_q_head_num // self.pool.heads
        attention.warm_up(self.pool.k.dtype, self.pool.head_dim, group)
        self.compressor.warm_up()
        logger.info(
            "laprox: %s kept, window %d, sink %d, score %s, allocation %s, kernels %s; %d layers x %d KV heads; "
            "static memory: query ring %.1f MB, W_O factors %.1f MB, W_O %.1f MB",
            f"{config.budget_tokens} entries per head" if config.budget_tokens else f"ratio {self.ratio}",
            config.window,
            config.sink,
            config.score,
            config.allocation,
            attention.name,
            self.pool.layers,
            self.pool.heads,
            self.ring.nbytes / 1e6,
            self.compressor.projection.nbytes / 1e6,
            0 if self.compressor.output is None else self.compressor.output.nbytes / 1e6,
        )

    @property
    def ratio(self) -> float | None:
        if self.config.budget_tokens is not None:
            return None
        return LaProxConfig.DEFAULT_RATIO if self.config.ratio is None else self.config.ratio

    def output_weights(self) -> torch.Tensor:
        """W_O of all layers, ``[L, H, G, D, hidden]`` in the pool's dtype."""
        weights = [weight.to(self.pool.k.dtype) for weight in self._effective_weights()]
        return torch.stack([weight.unflatten(0, (self.pool.heads, -1)) for weight in weights])

    def _effective_weights(self) -> Iterator[torch.Tensor]:
        heads = self.layers[0].attention.tp_q_head_num
        for each in self.layers:
            yield effective_weight(each.o_proj, heads, self.pool.head_dim, self.dtype, self.pool.device)

    # Called around every batch by patches.run_batch

    def before_batch(self, batch: Any) -> None:
        """Tell the backend which rows each request of the batch reads."""
        if self.batch_observer is not None:
            self.batch_observer(batch)
        if batch.forward_mode.is_idle():
            self.backend.announce(None)
            return
        if batch.forward_mode.is_extend():
            for req, computed_from in zip(batch.reqs, batch.prefix_lens, strict=True):
                self.tree.began(req, computed_from)
        tables = [self.tree.path_table(req.last_node) for req in batch.reqs]
        self.backend.announce(BatchPaths(tables, [req.kv.req_pool_idx for req in batch.reqs]))

    def after_batch(self, batch: Any) -> bool:
        """Compress the prompts whose last chunk has just been launched, before any next step is.

        Returns whether the device may have been given work besides the batch.
        """
        launched = batch.forward_mode.is_extend()
        if self.config.rescore_interval:
            for req in batch.decoding_reqs or () if batch.forward_mode.is_extend() else batch.reqs:
                launched = self.tree.rescore(req) or launched
        if not batch.forward_mode.is_extend():
            return launched
        decoding = set(map(id, batch.decoding_reqs or ()))
        for req in batch.reqs:
            last_chunk = req.extend_end == len(req.full_untruncated_fill_ids)
            if last_chunk and id(req) not in decoding and not req.finished() and not req.is_retracted:
                self.tree.finish_prefill(req)
        return launched

    def state(self) -> dict[str, Any]:
        """The ``laprox`` block of ``/server_info``'s internal state; see ``observe.schema.ReplicaStats``."""
        tree, stats = self.tree, self.tree.stats
        held = tree.evictable_size() + tree.protected_size()
        return {
            "score": self.config.score,
            "allocation": self.config.allocation,
            "kernels": self.compressor.attention.name,
            "cuda_graphs": self.config.cuda_graphs,
            "policy": f"{self.config.score}/{self.config.allocation}",
            "ratio": self.ratio,
            "budget_tokens": self.config.budget_tokens,
            "window": self.config.window,
            "sink": self.config.sink,
            "min_tokens": self.config.min_tokens,
            "rescore_interval": self.config.rescore_interval,
            "pool_kernel": self.config.pool_kernel,
            "layers": self.pool.layers,
            "kv_heads": self.pool.heads,
            "nodes": {
                "dense": len(tree.by_id) - stats.segments,
                "compressed": stats.segments,
                "held_back": len(tree.held_back),
            },
            "refused_modes": [mode.name for mode in REFUSED_MODES],
            "slots_total": tree.token_to_kv_pool_allocator.size,
            "slots_free": tree.token_to_kv_pool_allocator.available_size(),
            "slots_held": held,
            "tokens_cached": held + stats.slots_saved,
            **stats.to_dict(),
        }


def build_tree_cache(ctx: TreeCacheBuildContext) -> LaProxRadixCache:
    """The factory behind ``--radix-cache-backend laprox``."""
    global _runtime
    from laprox_sglang.patches import require_all

    require_all()
    config = getattr(ctx.server_args, "_laprox_config", None) or LaProxConfig()
    _runtime = Runtime(ctx, config)
    return _runtime.tree
