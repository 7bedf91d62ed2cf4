"""The chat client, scripted and by hand, against a server that only pretends."""

from __future__ import annotations

import pytest

from laprox_sglang import cli
from laprox_sglang.chat import interactive, scripted
from laprox_sglang.chat.client import CacheState, ChatError, Conversation, Server
from tests.cli.fake_server import FakeServer


@pytest.fixture
def fake():
    server = FakeServer()
    yield server
    server.close()


def test_a_turn_is_measured_and_remembered(fake):
    with Server(fake.url + "/") as server:
        conversation = Conversation(server, "system text", max_tokens=7)
        pieces: list[str] = []
        turn = conversation.ask("first?", pieces.append)
        conversation.ask("second?")
    assert turn.answer == "The answer." and "".join(pieces) == turn.answer
    assert (turn.prompt_tokens, turn.answer_tokens, turn.cached_tokens) == (50, 3, 40)
    assert turn.cache == CacheState(120, 30)
    assert 0 < turn.first_token_seconds <= turn.seconds
    assert [message["role"] for message in fake.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert fake.requests[0]["max_tokens"] == 7 and fake.requests[0]["temperature"] == 0


def test_stock_server_has_no_slots(fake):
    fake.laprox = None
    with Server(fake.url) as server:
        assert Conversation(server).ask("?").cache == CacheState(None, None)


def test_refusal_gives_the_reason_and_leaves_the_chat_as_it_was(fake):
    with Server(fake.url) as server:
        conversation = Conversation(server)
        conversation.ask("good")
        before = list(conversation.messages)
        fake.refusal = (400, {"message": "input is too long"})
        with pytest.raises(ChatError, match=r"\(400\): input is too long"):
            conversation.ask("bad")
        assert conversation.messages == before


def test_no_server_names_the_remedy(capsys):
    assert cli.main(["chat", "--url", "http://127.0.0.1:9", "--script"]) == 2
    message = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9" in message and "laprox-sglang serve" in message


def test_api_key_is_sent(fake):
    with Server(fake.url, api_key="k") as server:
        assert server.model() == "tiny"
    assert fake.authorization == ["Bearer k"]


def test_scripted_chat_prints_table_and_picture(fake, tmp_path, capsys):
    picture = tmp_path / "deep" / "chat.svg"
    assert cli.main(["chat", "--url", fake.url, "--script", "--turns", "3", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.count("The answer.") == 4
    assert "chat 1, turn 3" in text and "chat 2, turn 1" in text and "would hold 150" in text
    assert picture.read_text().startswith("<svg")
    first, second = fake.requests[0]["messages"], fake.requests[3]["messages"]
    assert first[0] == second[0] and first[0]["content"] == scripted.system_message()
    assert len(fake.requests[2]["messages"]) == 6 and len(second) == 2


def test_document_is_long_and_answers_the_questions():
    text = scripted.document()
    assert 1000 < len(text.split()) < 1600
    for fact in ("Marta Lindqvist", "1974", "Kittiwake", "Ingrid Solheim", "Tuesdays and Thursdays", "Bosun"):
        assert fact in text


def test_interactive_chat(fake, monkeypatch, capsys, tmp_path):
    document = tmp_path / "document.txt"
    document.write_text("All about ropes.")
    lines = iter(["hello?", "", "/help", "/new", "again?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    arguments = ["chat", "--url", fake.url, "--document", str(document)]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("The answer.\n[50 prompt tokens, 40 cached, first token") == 2
    assert "120 slots held, 30 saved]" in text
    assert [len(request["messages"]) for request in fake.requests] == [2, 2]
    assert "All about ropes." in fake.requests[1]["messages"][0]["content"]


def test_interactive_chat_goes_on_after_a_refusal_and_ends_with_the_input(fake, monkeypatch, capsys):
    fake.refusal = (400, {"message": "too long"})
    answers = iter(["hello?"])

    def read(_: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    with Server(fake.url) as server:
        assert interactive.run(server, document=None, turns=None, max_tokens=8, temperature=0.0) == 0
    assert "too long" in capsys.readouterr().out


@pytest.mark.parametrize("url", ["127.0.0.1:31555", "http://127.0.0.1:31555/", "http://127.0.0.1:31555/v1"])
def test_a_url_may_be_given_as_people_copy_it(url):
    with Server(url) as server:
        assert server.url == "http://127.0.0.1:31555"
