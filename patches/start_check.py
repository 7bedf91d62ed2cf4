"""Refuses, before anything is loaded, modes and combinations that our cache does not work with.

``resolve_once`` is where SGLang decides the final configuration, in the process that the user started.
"""

from __future__ import annotations

from typing import Any

from laprox_sglang.config import BACKEND_NAME, ConfigError
from laprox_sglang.refused import first_refused

TARGET = "sglang.srt.server_args.ServerArgs.resolve_once"
TYPE = "after"
PARAMETERS = ("self",)


def hook(result: None, server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    attention = {cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend} - {None}
    radix = cfg.radix_cache_backend
    asked = BACKEND_NAME in attention or radix == BACKEND_NAME or hasattr(server_args, "_laprox_config")
    if not asked:
        return
    if attention != {BACKEND_NAME} or radix != BACKEND_NAME:
        found = "/".join(sorted(attention)) or "default"
        raise ConfigError(
            f"laprox needs both of its backends, found --attention-backend {found} and --radix-cache-backend "
            f"{radix or 'default'}; add --attention-backend laprox --radix-cache-backend laprox --page-size 1, "
            "or start with `laprox-sglang serve`"
        )
    settings = getattr(server_args, "_laprox_config", None)
    if settings is not None:
        settings.check_device(str(cfg.device))
    mode = first_refused(cfg)
    if mode is not None:
        raise ConfigError(mode.message)
