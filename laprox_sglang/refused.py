"""The modes of SGLang that the compressed cache does not work with, each with its reason and remedy.

Read from the resolved server configuration, so a mode counts however it was switched on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedMode:
    name: str
    flag: str
    reason: str
    remedy: str
    is_on: Callable[[Any], bool]

    @property
    def message(self) -> str:
        return f"laprox does not work with {self.name} ({self.flag}): {self.reason}; {self.remedy}"


def _set(*names: str) -> Callable[[Any], bool]:
    return lambda cfg: any(bool(getattr(cfg, name, None)) for name in names)


def _graphs_on_cuda(cfg: Any) -> Any:
    return getattr(cfg, "cuda_graph_config", None) if str(getattr(cfg, "device", "") or "").startswith("cuda") else None


def _records_prefill(cfg: Any) -> bool:
    graphs = _graphs_on_cuda(cfg)
    return graphs is not None and graphs.prefill.backend != "disabled"


def _records_decode(cfg: Any) -> bool:
    graphs = _graphs_on_cuda(cfg)
    if graphs is None or graphs.decode.backend == "disabled":
        return False
    settings = getattr(cfg, "_laprox_config", None)
    asked = settings is not None and settings.cuda_graphs == "decode"
    return not asked or graphs.decode.backend != "full"


REFUSED_MODES = (
    RefusedMode(
        "pages of several tokens",
        "--page-size",
        "kept entries are single tokens",
        "use --page-size 1",
        lambda cfg: (cfg.page_size or 1) != 1,
    ),
    RefusedMode(
        "speculative decoding",
        "--speculative-algorithm",
        "draft tokens are verified against positions that may be compressed",
        "drop the flag",
        _set("speculative_algorithm"),
    ),
    RefusedMode(
        "the hierarchical cache",
        "--enable-hierarchical-cache, --enable-lmcache, --enable-flexkv",
        "host copies are made slot by slot, not row by row",
        "drop the flag",
        _set("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"),
    ),
    RefusedMode(
        "prefill-decode disaggregation",
        "--disaggregation-mode",
        "KV is sent slot by slot, not row by row",
        "use --disaggregation-mode null",
        lambda cfg: cfg.disaggregation_mode not in (None, "null"),
    ),
    RefusedMode(
        "a quantised KV cache",
        "--kv-cache-dtype",
        "its scales are kept per slot",
        "use --kv-cache-dtype auto",
        lambda cfg: cfg.kv_cache_dtype not in (None, "auto", "bf16", "bfloat16"),
    ),
    RefusedMode(
        "data parallel attention",
        "--enable-dp-attention",
        "its ranks must agree on every batch",
        "use --dp-size for whole replicas",
        lambda cfg: bool(getattr(cfg, "enable_dp_attention", False)) or (getattr(cfg, "attn_dp_size", None) or 1) > 1,
    ),
    RefusedMode(
        "pipeline parallelism",
        "--pipeline-parallel-size",
        "the budget is shared by all layers, which lie on several ranks",
        "use --tensor-parallel-size",
        lambda cfg: (cfg.pp_size or 1) > 1,
    ),
    RefusedMode(
        "streaming sessions",
        "--enable-streaming-session",
        "a session keeps its row outside the tree",
        "drop the flag; the radix cache reuses earlier turns",
        _set("enable_streaming_session"),
    ),
    RefusedMode(
        "a disabled radix cache",
        "--disable-radix-cache",
        "compressed prefixes live in the radix tree",
        "drop the flag",
        _set("disable_radix_cache"),
    ),
    RefusedMode(
        "the unified memory pool",
        "--enable-unified-memory",
        "it moves slots behind the tree's back",
        "drop the flag",
        _set("enable_unified_memory"),
    ),
    RefusedMode(
        "two-batch overlap",
        "--enable-two-batch-overlap",
        "it splits a batch behind the attention backend's back",
        "drop the flag",
        _set("enable_two_batch_overlap"),
    ),
    RefusedMode(
        "PD multiplexing",
        "--enable-pdmux",
        "it runs prefill and decode on streams of their own, and compression must come between them",
        "drop the flag",
        _set("enable_pdmux"),
    ),
    RefusedMode(
        "CUDA graphs of prefills",
        "--cuda-graph-backend-prefill",
        "a captured graph would not see compressed rows",
        "use --disable-prefill-cuda-graph",
        _records_prefill,
    ),
    RefusedMode(
        "CUDA graphs of decode steps, unless asked for",
        "--cuda-graph-backend-decode",
        "they are written but no GPU has run them",
        "use --disable-decode-cuda-graph, or --laprox-cuda-graphs decode with the backend full",
        _records_decode,
    ),
)


def first_refused(cfg: Any) -> RefusedMode | None:
    """The first mode that is on in a resolved configuration."""
    return next((mode for mode in REFUSED_MODES if mode.is_on(cfg)), None)
