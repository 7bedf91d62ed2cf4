"""Endpoints, metrics and page of a real server: they show the same numbers, and the right ones."""

import io
import json
import os
import re
import shutil
import threading
import time

import httpx
import numpy as np
import pytest

from laprox_sglang.observe import schema
from laprox_sglang.observe.top import Source, picture
from tests.server.harness import LAPROX, Server
from tests.server.tiny_models import tiny_model, tokens

KEY = "admin key"
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--laprox-ratio", "0.25", "--laprox-rescore-interval", "64")
FLAGS += ("--enable-metrics", "--admin-api-key", KEY)
HEADERS = {"Authorization": f"Bearer {KEY}"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
CHROMIUM_FLAGS += ["--disable-background-networking", "--disable-component-update"]
PATHS = ("", "/stats", "/segments", "/segment?id=1", "/conversations", "/map", "/history", "/events")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace")
    running = Server(tiny_model(), *LAPROX, *FLAGS, env={"LAPROX_SGLANG_TRACE": str(trace)})
    running.client.headers.update(HEADERS)
    running.trace = trace
    with running:
        yield running


def get(server: Server, path: str) -> dict:
    reply = server.client.get(f"/laprox/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def stats(server: Server) -> schema.ReplicaStats:
    (found,) = schema.Stats(**get(server, "stats")).replicas
    return found


def metrics(server: Server) -> dict[str, float]:
    lines = re.findall(r"^sglang:laprox_(\w+)(\{.*\}) (\S+)$", server.client.get("/metrics").text, re.MULTILINE)
    assert all('model_name="' in labels and 'tp_rank="0"' in labels for _, labels, _ in lines)
    return {name: float(value) for name, _, value in lines if not name.endswith("_bucket")}


def play(server: Server) -> None:
    """Two documents, a fork of the first in the midst of its compressed part, a follow-up, and a long answer."""
    first, second = tokens(900, 1), tokens(700, 2)
    server.generate(first, 8)
    server.generate(second, 300)
    server.generate(first[:400] + tokens(200, 3), 8)
    server.generate(first + tokens(30, 4), 8)


def test_without_the_key_nothing_is_told(server):
    with httpx.Client(base_url=server.client.base_url, trust_env=False) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert stranger.post("/flush_cache", headers=headers).status_code == 401
            for path in PATHS:
                assert stranger.get(f"/laprox{path}", headers=headers).status_code == 401, path
        # What has SGLang's key-free levels stays as it was.
        assert stranger.get("/metrics").status_code == 200 and stranger.get("/health").status_code == 200


def test_all_tell_the_same_numbers_and_they_are_the_trees(server):
    server.flush()
    before, files = stats(server), set(server.trace.glob("*.npz"))
    counted = metrics(server)
    play(server)
    server.idle_slots()
    now, info, shown = stats(server), server.laprox(), metrics(server)
    assert now.model_dump(exclude={"replica"}) == info
    # What was compressed, from the files that the compressor itself writes.
    written = [np.load(file) for file in set(server.trace.glob("*.npz")) - files]
    # A rest that was too short when its request finished was scored, but is dense still.
    written = [each for each in written if each["start"] + each["tokens"] < each["end"] or each["tokens"] >= 128]
    kept = sum(len(each["positions"]) for each in written)
    dropped = sum(int(each["tokens"]) * 4 for each in written) - kept
    assert now.compressions - before.compressions == len(written) >= 5
    assert now.entries_kept - before.entries_kept == kept
    assert now.entries_dropped - before.entries_dropped == dropped
    assert now.rescores - before.rescores >= 3 and now.splits > before.splits
    # What is held: nothing was evicted, and splits keep every entry.
    assert shown["kept_entries"] == now.segment_entries == kept
    assert shown["saved_slots"] == now.slots_saved and shown["segments"] == now.segments
    assert shown["dropped_entries_total"] == now.entries_dropped
    assert shown["rescore_total"] == now.rescores and shown["splits_total"] == now.splits
    assert shown["rescore_seconds_sum"] == pytest.approx(now.rescore_seconds)
    assert shown["compress_seconds_sum"] == pytest.approx(now.compress_seconds + now.finish_seconds)
    assert shown["compress_seconds_count"] > counted["compress_seconds_count"]
    # The lists add up to the counters, and the counters to the allocator's.
    (listed,) = schema.Segments(**get(server, "segments?limit=100")).replicas
    assert len(listed.segments) == now.segments == now.nodes.compressed
    assert listed.nodes == now.nodes.compressed + now.nodes.dense
    assert sum(each.tokens for each in listed.segments) == now.segment_tokens
    assert sum(each.slots for each in listed.segments) == now.segment_slots
    total = np.sum([each.kept for each in listed.segments], axis=0)
    assert total.tolist() == get(server, "map")["replicas"][0]["kept"] and total.sum() == kept
    assert now.slots_held == now.slots_total - now.slots_free == now.tokens_cached - now.slots_saved
    assert (now.prompt_tokens - before.prompt_tokens, now.cached_tokens - before.cached_tokens) == (3130, 400 + 900)
    (talks,) = schema.Conversations(**get(server, "conversations")).replicas
    slots = {part.id: part.slots for each in talks.conversations for part in each.stretches}
    assert sum(slots.values()) == now.slots_held
    (past,) = schema.History(**get(server, "history")).replicas
    assert [each.number for each in past.compressions][-len(written) :] == list(
        range(now.compressions - len(written) + 1, now.compressions + 1)
    )
    assert (past.samples[-1].slots, past.samples[-1].tokens) == (now.slots_held, now.tokens_cached)


def test_what_is_shown_has_no_prompt_and_no_salt(server):
    prompt = tokens(400, 77)
    server.generate(prompt, 4, rid="request-of-mine", extra_key="tenant-secret")
    replies = [
        server.client.get(f"/laprox{path}").text for path in PATHS[1:] if path not in ("/events", "/segment?id=1")
    ]
    (listed,) = get(server, "segments?order=recent&limit=1")["replicas"]
    replies.append(server.client.get(f"/laprox/segment?id={listed['segments'][0]['id']}").text)
    for text in replies:
        assert "tenant-secret" not in text and "request-of-mine" not in text
        assert ", ".join(map(str, prompt[100:103])) not in text and ",".join(map(str, prompt[100:103])) not in text


def test_the_schema_names_what_is_answered(server):
    described = server.client.get("/openapi.json").json()
    reply = described["paths"]["/laprox/stats"]["get"]["responses"]["200"]["content"]["application/json"]
    assert reply["schema"]["$ref"].endswith("/Stats")
    assert "slots_saved" in described["components"]["schemas"]["ReplicaStats"]["properties"]
    assert server.client.get("/laprox/segments?order=cutest").status_code == 400
    assert server.client.get("/laprox/segment?id=123456789").status_code == 404


def test_top_shows_the_numbers(server):
    from rich.console import Console

    source = Source(str(server.client.base_url), KEY)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(picture(source))
    text, now = console.export_text(), stats(server)
    for value in (now.slots_held, now.tokens_cached, now.slots_saved, now.entries_dropped):
        assert f"{value:,}" in text
    assert len(re.findall(r"head \d", text)) == now.kv_heads and "largest segments" in text


class Viewer:
    """A page in Chromium that has signed in, and everything that its console complained about."""

    def __init__(self, browser, server: Server, width: int, theme: str, headers: dict | None = HEADERS):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, extra_http_headers=headers
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.reply = self.page.goto(f"{server.client.base_url}/laprox")

    def live(self) -> "Viewer":
        self.page.wait_for_selector(".status.live", timeout=30_000)
        return self

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def until(self, script: str, seconds: float = 30) -> None:
        """Wait until it is true. Playwright's own way runs strings in the page, which the page's policy forbids."""
        deadline = time.monotonic() + seconds
        while not self.page.evaluate(script):
            assert time.monotonic() < deadline, f"not true after {seconds} s: {script}"
            self.page.wait_for_timeout(50)

    def colours(self) -> list[str]:
        return self.page.eval_on_selector_all(".cell", "cells => cells.map(cell => cell.style.background)")

    def background(self) -> str:
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        # CI must see the page.
        assert not os.environ.get("LAPROX_SGLANG_NEEDS_BROWSER"), "no chromium"
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


def test_the_page_follows_a_chat(server, browser, tmp_path):
    server.flush()
    viewer = Viewer(browser, server, 1280, "light").live()
    page = viewer.page
    viewer.until("document.querySelector('#headline').textContent.includes('empty')")
    assert viewer.colours() == [] and "Nothing is compressed yet" in viewer.text("#heat")

    server.generate(tokens(600, 5), 8)
    viewer.until("document.querySelectorAll('.cell').length === 4")
    first, points = viewer.colours(), int(page.get_attribute("#chart", "data-points"))
    chat = threading.Thread(target=play, args=(server,))
    chat.start()
    viewer.until(f"Number(document.querySelector('#chart').dataset.points) > {points}")
    chat.join()
    server.idle_slots()
    now = stats(server)
    shown = f"document.querySelector('#count').textContent === '{now.compressions:,}'"
    viewer.until(f"{shown} && document.querySelectorAll('#segments tr').length === {now.segments}")
    kept = get(server, "map")["replicas"][0]["kept"]
    viewer.until(f"document.querySelector('#cell-1-1').ariaLabel.includes('{kept[1][1]:,} ')")
    assert viewer.colours() != first

    # The same numbers as the endpoints', with units.
    assert (page.get_attribute("#held", "title"), page.get_attribute("#saved", "title")) == (
        f"{now.slots_held:,}",
        f"{now.slots_saved:,}",
    )
    assert viewer.text("#held-note").startswith("slots of ") and "slot" in viewer.text("#saved-note")
    assert f"{now.tokens_cached:,} tokens in {now.slots_held:,} slots" in viewer.text("#headline")
    assert viewer.text("#hits") == f"{100 * now.cached_tokens / now.prompt_tokens:.1f}%"
    for layer in range(2):
        for head in range(2):
            assert f"{kept[layer][head]:,} entries" in page.get_attribute(f"#cell-{layer}-{head}", "aria-label")
    newest = get(server, "history")["replicas"][0]["compressions"][-1]
    assert viewer.text("#feed li:first-child b") == f"{newest['tokens']:,} → {newest['slots']:,} slots"
    assert page.locator("#talks > li").count() == 5

    # Without a mouse: walk the map, look at one head's positions, choose another segment, change the theme.
    page.focus("#heat")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#heat", "aria-activedescendant") == "cell-1-1"
    assert viewer.text("#heat-readout").startswith(f"Layer 1, head 1 keeps {kept[1][1]:,} of")
    page.keyboard.press("Enter")
    viewer.until("document.querySelector('#strip-readout').textContent.includes('layer 1, head 1')")
    page.keyboard.press("Escape")
    viewer.until("document.querySelector('#strip-readout').textContent.includes('all heads')")
    page.focus("#strip")
    page.keyboard.press("ArrowRight")
    assert re.match(r"Tokens? [\d,]+.*of the entries kept", viewer.text("#strip-readout"))
    page.focus("#chart")
    page.keyboard.press("Home")
    assert "without compression" in viewer.text("#chart-readout") and "Now" not in viewer.text("#chart-readout")
    other = page.locator("#segments tr:not(.chosen) button").first
    name = other.inner_text()
    other.focus()
    page.keyboard.press("Enter")
    viewer.until(f"document.querySelector('#segments tr.chosen button').textContent === '{name}'")
    viewer.until(f"document.querySelector('#heat-sub').textContent.includes('Segment {name}:')")
    backgrounds = [viewer.background()]
    page.screenshot(path=tmp_path / "light.png", full_page=True)
    page.focus("#theme")
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.get_attribute("html", "data-theme") == "dark"
    backgrounds.append(viewer.background())
    page.screenshot(path=tmp_path / "dark.png", full_page=True)
    assert len(set(backgrounds)) == 2
    assert viewer.complaints == []
    viewer.context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_fits_a_phone(server, browser, theme, tmp_path):
    viewer = Viewer(browser, server, 375, theme).live()
    viewer.until("document.querySelectorAll('#segments tr button').length > 0")
    assert viewer.page.evaluate("document.documentElement.scrollWidth") <= 375
    assert viewer.page.get_attribute("html", "data-theme") == theme
    viewer.page.screenshot(path=tmp_path / f"{theme}.png", full_page=True)
    assert viewer.complaints == []
    viewer.context.close()


def test_signing_in_and_losing_the_server(server, browser):
    viewer = Viewer(browser, server, 800, "light", headers=None)
    page = viewer.page
    assert viewer.reply.status == 401
    page.wait_for_selector("#sign-in:not([hidden])")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    viewer.until("document.querySelector('#key-error').textContent !== ''")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    viewer.live()
    assert page.is_hidden("#sign-in") and page.is_visible("#board")
    # The key stays in the tab and out of addresses.
    assert KEY not in page.url and page.evaluate("sessionStorage.getItem('laprox-key')") == KEY
    # A listener whose connection breaks says so, and comes back by itself.
    page.route("**/laprox/events", lambda route: route.abort())
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert viewer.text("#status-text") == "Paused"
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    viewer.until("document.querySelector('#status-text').textContent.includes('No connection')")
    page.unroute("**/laprox/events")
    viewer.live()
    viewer.context.close()


def test_events_are_told_as_they_happen(server):
    server.flush()
    events: list[dict] = []

    def listen() -> None:
        with server.client.stream("GET", "/laprox/events", timeout=30) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if events[-1]["compressions"]:
                        return

    listener = threading.Thread(target=listen)
    listener.start()
    while not events:
        time.sleep(0.05)
    started = time.time()
    server.generate(tokens(500, 91), 2)
    listener.join()
    (done,) = schema.Live(**events[-1]).compressions
    assert done.kind == "prompt" and done.tokens == 500 - 32 and done.freed == done.tokens - done.slots
    assert started - 1 < done.time < time.time() and events[-1]["time"] - done.time < 3
