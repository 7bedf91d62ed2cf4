"""One conversation with a running server through its OpenAI API, and what each turn cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


class ChatError(RuntimeError):
    """The server did not answer as expected; the message says what to do."""


@dataclass(frozen=True)
class CacheState:
    """Slots of the compressed cache after a turn. None where the server has no compressed cache (stock SGLang)."""

    slots_held: int | None = None
    slots_saved: int | None = None


@dataclass(frozen=True)
class Turn:
    """``first_token_seconds`` is None when the answer has no text; cached_tokens when the server does not report it."""

    question: str
    answer: str
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None
    first_token_seconds: float | None
    seconds: float
    cache: CacheState = field(default_factory=CacheState)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the answer after its first token."""
        if self.first_token_seconds is None or self.answer_tokens < 2:
            return None
        rest = self.seconds - self.first_token_seconds
        return (self.answer_tokens - 1) / rest if rest > 0 else None


class Server:
    """A running SGLang server. Raises ChatError with the reason and the remedy."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        # As people copy it: with the OpenAI path behind it, or without the scheme.
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = "http://" + self.url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def model(self) -> str:
        """Name of the model that is served, without the folders above it."""
        models = self._get("/v1/models").get("data") or [{}]
        return str(models[0].get("id", "default")).rstrip("/").rsplit("/", 1)[-1]

    def cache_state(self) -> CacheState:
        states = self._get("/server_info").get("internal_states") or [{}]
        laprox = states[0].get("laprox") or {}
        return CacheState(laprox.get("slots_held"), laprox.get("slots_saved"))

    def is_healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stream_chat(
        self, messages: list[dict[str, str]], max_tokens: int, temperature: float
    ) -> Iterator[dict[str, Any]]:
        """The chunks of one streamed answer; the last one carries ``usage``."""
        body = {
            "model": "default",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(
                        f"the server refused the request ({response.status_code}): {_reason(response.text)}"
                    )
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        chunk = json.loads(line[len("data: ") :])
                        if "error" in chunk:
                            raise ChatError(
                                f"the server stopped the answer: {chunk['error'].get('message', chunk['error'])}"
                            )
                        yield chunk
        except httpx.HTTPError as error:
            raise ChatError(self._unreachable(error)) from error

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise ChatError(self._unreachable(error)) from error
        if response.status_code != 200:
            raise ChatError(f"{self.url}{path} answered {response.status_code}: {_reason(response.text)}")
        value: dict[str, Any] = response.json()
        return value

    def _unreachable(self, error: Exception) -> str:
        return f"no answer from {self.url} ({type(error).__name__}: {error}); start one with `laprox-sglang serve`"


class Conversation:
    """A chat whose whole history is sent again with every turn, as chat clients do."""

    def __init__(
        self, server: Server, system: str | None = None, *, max_tokens: int = 256, temperature: float = 0.0
    ) -> None:
        self.server = server
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, on_text: Callable[[str], None] | None = None) -> Turn:
        """Send one more user message; ``on_text`` gets the answer piece by piece. A failed turn leaves no trace."""
        messages = [*self.messages, {"role": "user", "content": question}]
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        first = None
        start = time.perf_counter()
        for chunk in self.server.stream_chat(messages, self.max_tokens, self.temperature):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or ():
                text = choice.get("delta", {}).get("content")
                if text:
                    first = time.perf_counter() - start if first is None else first
                    pieces.append(text)
                    if on_text is not None:
                        on_text(text)
        seconds = time.perf_counter() - start
        answer = "".join(pieces)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return Turn(
            question=question,
            answer=answer,
            prompt_tokens=usage.get("prompt_tokens", 0),
            answer_tokens=usage.get("completion_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            first_token_seconds=first,
            seconds=seconds,
            cache=self.server.cache_state(),
        )


def _reason(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip()[:300] or "no reason given"
    if isinstance(value, dict):
        error = value.get("error", value)
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or value)[:300]
    return text[:300]
