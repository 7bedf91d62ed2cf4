"""Adds the ``--laprox-*`` flags to SGLang's command line (since 0.5.23: ServerArgs.add_cli_args builds the parser)."""

from __future__ import annotations

from typing import Any

from laprox_sglang.config import add_flags

TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"
TYPE = "after"
PARAMETERS = ("parser",)


def hook(result: None, parser: Any) -> None:
    add_flags(parser)
