"""SGLang's entry point (group ``sglang.srt.plugins``): called in the main, scheduler and detokenizer processes."""

from __future__ import annotations

import os
import sys

from laprox_sglang.config import BACKEND_NAME, ENABLE_VARIABLE

_active = False


def activate() -> None:
    """Register backends, flags and hooks. Idempotent; nothing at all with ``LAPROX_SGLANG_ENABLE=0``.

    An exception here is only logged by SGLang; the backend names are then unknown and a server that asks for them
    does not start.
    """
    global _active
    if _active or os.environ.get(ENABLE_VARIABLE, "1").strip().lower() in ("0", "false", "off", "no"):
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from laprox_sglang import cpu_engine, patches

    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(_attention_backend)
    register_radix_cache_backend(BACKEND_NAME, _tree_cache)
    patches.install()
    if cpu_engine.is_enabled() and patches.SCHEDULER_MODULE in sys.modules:
        from laprox_sglang.cpu_engine import fused_layers

        fused_layers.install()
    _active = True


def _attention_backend(model_runner):  # type: ignore[no-untyped-def]
    from laprox_sglang import parts
    from laprox_sglang.attention.backend import LaProxAttentionBackend
    from laprox_sglang.config import LaProxConfig

    config = getattr(model_runner.server_args, "_laprox_config", None) or LaProxConfig()
    return LaProxAttentionBackend(model_runner, lambda: parts.build(model_runner, config))


def _tree_cache(ctx):  # type: ignore[no-untyped-def]
    from laprox_sglang.runtime import build_tree_cache

    return build_tree_cache(ctx)
