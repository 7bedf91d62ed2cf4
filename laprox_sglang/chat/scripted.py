"""The scripted chat: one long document, a multi-turn chat about it, then another chat over the same document."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from laprox_sglang.chat import report
from laprox_sglang.chat.client import Conversation, Server

QUESTIONS = (
    "Who founded the harbour museum?",
    "In which year did the museum open?",
    "What is the name of the museum's ship?",
    "Who was the last keeper of the lighthouse?",
    "On which days do the volunteers work?",
)
OTHER_CHAT_QUESTION = "What is the name of the museum's cat?"
MAX_TOKENS = 48


def document() -> str:
    return resources.files("laprox_sglang.chat").joinpath("document.txt").read_text(encoding="utf-8")


def system_message() -> str:
    return "Answer in one short sentence, using only this document.\n\n" + document().strip()


def run(server: Server, *, turns: int | None, picture: Path | None) -> int:
    """Play the chat, print each answer, then the table; ``picture`` is where the SVG goes. Returns the exit code."""
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(turns or len(QUESTIONS))]
    print(f"Scripted chat with {server.model()} at {server.url}: {len(questions)} turns about one document,")
    print("then another chat over the same document.\n")
    rows: list[report.Row] = []
    chats = [("chat 1", questions), ("chat 2", [OTHER_CHAT_QUESTION])]
    for chat, chat_questions in chats:
        conversation = Conversation(server, system_message(), max_tokens=MAX_TOKENS)
        for number, question in enumerate(chat_questions, start=1):
            print(f"{chat}, turn {number}: {question}")
            turn = conversation.ask(question)
            print(f"  {' '.join(turn.answer.split())}")
            rows.append((f"{chat}, turn {number}", turn))
    print(f"\n{report.table(rows)}\n\n{report.legend(rows)}")
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(report.picture(rows, "What each turn reused and what the cache held"), encoding="utf-8")
        print(f"Picture: {picture}")
    return 0
