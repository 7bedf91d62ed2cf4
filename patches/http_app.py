"""Adds ``/laprox`` and what is below it to SGLang's own HTTP server.

The target is the last step before SGLang starts to listen, its only one in a module that costs nothing to import: a
hook on the HTTP server's module itself would load it into the scheduler and detokenizer processes too.
"""

from __future__ import annotations

import sys
from typing import Any

from laprox_sglang.config import BACKEND_NAME

TARGET = "sglang.srt.utils.common.set_uvicorn_logging_configs"
TYPE = "after"
PARAMETERS = ("server_args",)
HTTP_MODULE = "sglang.srt.entrypoints.http_server"


def hook(result: None, server_args: Any = None) -> None:
    if server_args is None or HTTP_MODULE not in sys.modules:
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    if config.radix_cache_backend != BACKEND_NAME:
        return
    from laprox_sglang.observe import app

    app.install(worker_processes=config.tokenizer_worker_num > 1)
