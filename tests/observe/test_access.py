"""Who may read ``/laprox``: exactly who may use SGLang's own endpoints of the same level, with its own key check."""

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level

from laprox_sglang.observe import app as observe_app
from laprox_sglang.observe import channel, endpoints

PATHS = ["/laprox", "/laprox/stats", "/laprox/segments", "/laprox/segment?id=1", "/laprox/conversations"]
PATHS += ["/laprox/map", "/laprox/history", "/laprox/events"]
KEYS = [(None, None), ("user", None), (None, "boss"), ("user", "boss")]


def client_for(api_key, admin_api_key, monkeypatch) -> TestClient:
    async def ask(*_, **__):
        raise channel.NoAnswerError("no scheduler in this test")

    async def nothing():
        yield "retry: 1\n\n"

    monkeypatch.setattr(endpoints, "_manager", lambda: None)
    monkeypatch.setattr(channel, "ask", ask)
    monkeypatch.setattr(endpoints.feed, "listen", nothing)
    app = FastAPI()

    @app.get("/theirs")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def theirs():
        return {}

    # In SGLang's order: its key check is there before our endpoints come.
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    observe_app.add_to(app)
    return TestClient(app)


@pytest.mark.parametrize(("api_key", "admin_api_key"), KEYS)
@pytest.mark.parametrize("given", [None, "user", "boss", "wrong"])
def test_the_same_as_sglangs_own(api_key, admin_api_key, given, monkeypatch):
    client = client_for(api_key, admin_api_key, monkeypatch)
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    expected = client.get("/theirs", headers=headers).status_code
    assert expected == (200 if given == (admin_api_key or api_key) or not (api_key or admin_api_key) else 401)
    for path in PATHS:
        # Who is let in learns that there is no scheduler here (503), except where none is needed.
        allowed = (200,) if path in ("/laprox", "/laprox/events") else (503,)
        assert client.get(path, headers=headers).status_code in (allowed if expected == 200 else (401,)), path


def test_a_browser_without_a_key_gets_the_page_and_nothing_else(monkeypatch):
    client = client_for("user", None, monkeypatch)
    refused, fine = client.get("/laprox"), client.get("/laprox", headers={"Authorization": "Bearer user"})
    assert refused.status_code == 401 and fine.status_code == 200
    assert refused.text == fine.text and refused.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in refused.headers["content-security-policy"]
    assert client.get("/laprox/stats").json() == {"error": "Unauthorized"}
    assert client.post("/laprox").status_code == 401


def test_the_page_is_one_document_that_loads_nothing(monkeypatch):
    text = client_for(None, None, monkeypatch).get("/laprox").text
    assert "/* STYLE */" not in text and "/* SCRIPT */" not in text
    for tag in ('<link rel="stylesheet', "<script src", "<img", "@import", "https://"):
        assert tag not in text
