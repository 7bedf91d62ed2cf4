"""Real prose for the evaluation: files of the user's, or the documentation that comes with Python."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


def documents(files: Sequence[Path], tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens, none overlapping, in a fixed order.

    Raises ValueError when the text is too short for that many.
    """
    pieces: list[list[int]] = []
    for text in texts(files):
        tokens = tokenizer.encode(text)
        pieces += [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    if len(pieces) < count:
        raise ValueError(
            f"the text has {len(pieces)} pieces of {length} tokens, {count} are asked for; give more files"
        )
    # Spread over the whole text rather than its beginning.
    return [pieces[index * len(pieces) // count] for index in range(count)]


def texts(files: Sequence[Path]) -> list[str]:
    return [file.read_text(errors="replace") for file in files] if files else [manual(), docstrings()]


@cache
def manual() -> str:
    """The chapters of Python's manual that come with it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@cache
def docstrings() -> str:
    """The longer docstrings of the standard library, by module name and place."""
    found = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 300:
                    name = file.stem if isinstance(node, ast.Module) else f"{file.stem}.{node.name}"
                    found.append(f"{name}: {text}")
    return "\n\n".join(found)


@cache
def words(low: int = 4, high: int = 9) -> list[str]:
    """Distinct lower-case words of the manual, in alphabetical order."""
    parts = {part.strip(".,;:()\"'") for part in manual().split()}
    return sorted(
        part for part in parts if part.isascii() and part.isalpha() and part.islower() and low <= len(part) <= high
    )
