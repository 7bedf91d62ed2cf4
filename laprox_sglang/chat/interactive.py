"""A chat by hand in the terminal: answers stream, and a line under each says what the turn cost."""

from __future__ import annotations

from pathlib import Path

from laprox_sglang.chat.client import ChatError, Conversation, Server, Turn

HELP = "/new starts another chat (over the same document), /quit or Ctrl-D ends"


def status(turn: Turn) -> str:
    """One line of facts about a turn."""
    parts = [f"{turn.prompt_tokens:,} prompt tokens"]
    if turn.cached_tokens is not None:
        parts.append(f"{turn.cached_tokens:,} cached")
    if turn.first_token_seconds is not None:
        parts.append(f"first token {turn.first_token_seconds:.2f} s")
    if turn.cache.slots_held is not None:
        parts.append(f"{turn.cache.slots_held:,} slots held, {turn.cache.slots_saved or 0:,} saved")
    return "[" + ", ".join(parts) + "]"


def run(server: Server, *, document: Path | None, turns: int | None, max_tokens: int, temperature: float) -> int:
    """Read questions from standard input until it ends, or for ``turns`` turns. Returns the exit code."""
    system = None
    if document is not None:
        system = "Answer questions about this document.\n\n" + document.read_text(encoding="utf-8")
    print(f"Chatting with {server.model()} at {server.url}. {HELP}")
    conversation = Conversation(server, system, max_tokens=max_tokens, temperature=temperature)
    done = 0
    while turns is None or done < turns:
        try:
            question = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            break
        if question == "/quit":
            break
        if question == "/new":
            conversation = Conversation(server, system, max_tokens=max_tokens, temperature=temperature)
            print("New chat.")
        elif question.startswith("/"):
            print(HELP)
        elif question:
            try:
                turn = conversation.ask(question, lambda text: print(text, end="", flush=True))
            except ChatError as error:
                print(f"{error}")  # a prompt that is too long, say: the chat goes on without this turn
            except KeyboardInterrupt:
                print("\n(stopped)")
            else:
                print(f"\n{status(turn)}")
                done += 1
    return 0
