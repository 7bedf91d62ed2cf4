"""A small HTTP server that answers like SGLang's, for tests of the chat client."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LAPROX_STATE = {"slots_held": 120, "slots_saved": 30}


class FakeServer:
    """``requests`` are the bodies received, ``laprox`` the state shown; ``refusal`` answers every chat."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.laprox: dict[str, Any] | None = LAPROX_STATE
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self.authorization: list[str | None] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                fake.authorization.append(self.headers.get("Authorization"))
                state = {} if fake.laprox is None else {"laprox": fake.laprox}
                answers: dict[str, Any] = {
                    "/health": {},
                    "/v1/models": {"data": [{"id": "/models/tiny"}]},
                    "/server_info": {"internal_states": [state]},
                }
                self.reply(200 if self.path in answers else 404, json.dumps(answers.get(self.path, {})))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append(body)
                if fake.refusal is not None:
                    self.reply(fake.refusal[0], json.dumps(fake.refusal[1]))
                    return
                usage = {"prompt_tokens": 50, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 40}}
                chunks: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
                chunks += [{"choices": [{"delta": {"content": text}}]} for text in ("The ", "answer", ".")]
                chunks.append({"choices": [], "usage": usage})
                lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
                self.reply(200, "".join(lines), "text/event-stream")

            def reply(self, status: int, text: str, kind: str = "application/json") -> None:
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
