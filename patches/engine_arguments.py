"""Lets ``sgl.Engine(laprox_ratio=...)`` take the settings that the command line takes.

Engine makes its ServerArgs through the class attribute ``server_args_class``, after it has loaded the plugins: the one
place where unknown keyword arguments can still be taken out. An attribute, so no registry hook applies.
"""

from __future__ import annotations

import sys
from typing import Any

from laprox_sglang.config import from_arguments

ENGINE_MODULE = "sglang.srt.entrypoints.engine"


def install() -> None:
    """Idempotent. Does nothing in a process that has not imported the engine: it cannot be constructing one."""
    module = sys.modules.get(ENGINE_MODULE)
    if module is None:
        return
    original = module.Engine.server_args_class
    if getattr(original, "takes_laprox", False):
        return

    def server_args_class(**kwargs: Any) -> Any:
        ours = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith("laprox_")}
        config = from_arguments(ours)
        server_args = original(**kwargs)
        if config is not None:
            server_args._laprox_config = config
        return server_args

    server_args_class.takes_laprox = True  # type: ignore[attr-defined]
    module.Engine.server_args_class = staticmethod(server_args_class)
