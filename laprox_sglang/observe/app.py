"""Puts our endpoints into SGLang's FastAPI app."""

from __future__ import annotations

import os
from typing import Any

WORKER_APP = "laprox_sglang.observe.worker:app"
WORKER_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"


def install(worker_processes: bool) -> None:
    """Idempotent. ``worker_processes``: each HTTP worker imports the app anew, by the path that SGLang reads there."""
    from sglang.srt.entrypoints.http_server import app

    if worker_processes:
        os.environ.setdefault(WORKER_VARIABLE, WORKER_APP)
    else:
        add_to(app)


def add_to(app: Any) -> None:
    from laprox_sglang.observe import endpoints, sign_in

    if getattr(app.state, "has_laprox", False):
        return
    app.state.has_laprox = True
    app.include_router(endpoints.router)
    app.add_middleware(sign_in.SignInPage)
