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
    # Not by include_router: SGLang's key check does not see the levels of an included router's endpoints.
    app.router.routes.extend(endpoints.router.routes)
    app.add_middleware(sign_in.SignInPage)
