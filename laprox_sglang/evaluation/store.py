"""Results as they come, one JSON object a line; what is there already is not measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# What names a row; everything else in it was measured.
KEYS = ("model", "seed", "task", "index", "length", "mode", "policy", "ratio")


class Store:
    """``rows.jsonl`` in a folder. A line that was cut off by a kill is left out when it is read again."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "rows.jsonl"
        self.rows: list[Row] = list(self._read())
        self._known = {self._key(row): row for row in self.rows}

    def find(self, **key: Any) -> Row | None:
        return self._known.get(self._key(key))

    def add(self, rows: list[Row]) -> None:
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                self.rows.append(row)
                self._known[self._key(row)] = row

    @staticmethod
    def _key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in KEYS)

    def _read(self) -> Iterator[Row]:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue
