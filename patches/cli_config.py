"""Keeps the parsed ``--laprox-*`` values with the server arguments.

ServerArgs takes only its own fields from the parsed arguments. Attributes with a leading underscore ride along to the
scheduler processes (ServerArgs.__reduce__), so ours is one of those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laprox_sglang.config import from_arguments

TARGET = "sglang.srt.server_args.ServerArgs.from_cli_args"
TYPE = "around"
PARAMETERS = ("cls", "args")


def hook(original: Callable[..., Any], cls: type, args: Any) -> Any:
    config = from_arguments(vars(args))
    server_args = original(cls, args)
    if config is not None:
        server_args._laprox_config = config
    return server_args
