"""The app of an HTTP worker process (``--tokenizer-worker-num`` over 1), which imports it by name."""

from sglang.srt.entrypoints.http_server import app

from laprox_sglang.observe.app import add_to

add_to(app)
__all__ = ["app"]
