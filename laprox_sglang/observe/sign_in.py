"""Where a key is missing, a browser that opens ``/laprox`` gets SGLang's 401 with the page as its body.

The page holds no data; it asks for the key and sends it with its own requests. So people can sign in, and no request
without a key is answered with anything but 401.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from laprox_sglang.observe import page

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
PATH = "/laprox"


class SignInPage:
    """ASGI middleware, outside SGLang's key check."""

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "GET" or path != PATH:
            await self.app(scope, receive, send)
            return
        refused = False

        async def with_page(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] == 401:
                refused = True
                body = page.html().encode()
                headers = {"content-type": "text/html; charset=utf-8", **page.headers()}
                headers |= {"content-length": str(len(body)), "www-authenticate": "Bearer"}
                pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 401, "headers": pairs})
                await send({"type": "http.response.body", "body": body})
            elif not refused:
                await send(message)

        await self.app(scope, receive, with_page)
