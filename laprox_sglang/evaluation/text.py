"""Real prose for the evaluation: files of the user's, or the chapters of Python's manual that come with Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def documents(files: Sequence[Path], tokenizer: object, length: int, count: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens, none overlapping, in a fixed order.

    Raises ValueError when the text is too short for that many.
    """
    if files:
        texts = [file.read_text(errors="replace") for file in files]
    else:
        from pydoc_data.topics import topics

        texts = ["\n\n".join(topics[name] for name in sorted(topics))]
    pieces: list[list[int]] = []
    for text in texts:
        tokens = tokenizer.encode(text)  # type: ignore[attr-defined]
        pieces += [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if len(pieces) < count:
        raise ValueError(
            f"the text has {len(pieces)} pieces of {length} tokens, {count} are asked for; give more files"
        )
    # Spread over the whole text rather than its beginning.
    return [pieces[index * len(pieces) // count] for index in range(count)]
