"""One thing to ask of a model: a conversation with a mark where the document ends, and what a right answer holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Stands in one message, behind the document. Question-agnostic runs compress what is before it, question-aware ones
# all of the conversation.
MARK = "\u241e"

Message = dict[str, str]


@dataclass(frozen=True)
class Item:
    """Attributes:
    task, index: identify it, with the seed and length that made it.
    messages: roles and contents; exactly one ``MARK`` in all contents together.
    answer: a right answer, which the model is made to read for the fidelity figures.
    expected: strings that a right answer contains, each counted alike; empty where only fidelity is measured.
    new_tokens: longest answer.
    metric: how an answer is judged: ``contains``, or a name in ``metrics``.
    meta: what plots and tables group by (depth, length, dataset).
    plain: the messages' text as it is, without the model's chat template.
    """

    task: str
    index: int
    messages: Sequence[Message]
    answer: str
    expected: Sequence[str] = ()
    new_tokens: int = 48
    metric: str = "contains"
    meta: dict[str, Any] = field(default_factory=dict)
    plain: bool = False


@dataclass(frozen=True)
class Prompt:
    """Token ids: the document, what comes after it up to the answer, and the answer."""

    document: list[int]
    question: list[int]
    answer: list[int]

    @property
    def asked(self) -> list[int]:
        return self.document + self.question

    @property
    def all(self) -> list[int]:
        return self.document + self.question + self.answer


def one_turn(document: str, question: str) -> list[Message]:
    return [{"role": "user", "content": f"{document}{MARK}{question}"}]


def tokenise(item: Item, tokenizer: Any) -> Prompt:
    """Raises ValueError unless the conversation holds exactly one mark."""
    if item.plain or not getattr(tokenizer, "chat_template", None):
        text = "\n\n".join(message["content"] for message in item.messages)
    else:
        text = tokenizer.apply_chat_template(list(item.messages), tokenize=False, add_generation_prompt=True)
    parts = text.split(MARK)
    if len(parts) != 2:
        raise ValueError(f"{item.task} {item.index} has {len(parts) - 1} marks, not one")
    special = item.plain and getattr(tokenizer, "bos_token_id", None) is not None
    document = tokenizer.encode(parts[0], add_special_tokens=special)
    question, answer = (tokenizer.encode(part, add_special_tokens=False) for part in (parts[1], item.answer))
    return Prompt(document, question, answer)


def contains(answer: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that the whole answer contains, in any case (RULER's string match)."""
    lowered = answer.lower()
    return sum(each.lower() in lowered for each in expected) / len(expected)
