"""What the turns of a chat cost: a text table and a small SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from laprox_sglang.chat.client import Turn

HEADINGS = (
    "turn",
    "prompt\ntokens",
    "cached\ntokens",
    "first\ntoken, s",
    "answer\ntokens/s",
    "slots\nheld",
    "slots\nsaved",
)
Row = tuple[str, Turn]


def cells(name: str, turn: Turn) -> tuple[str, ...]:
    return (
        name,
        _number(turn.prompt_tokens),
        _number(turn.cached_tokens),
        _number(turn.first_token_seconds, 2),
        _number(turn.tokens_per_second, 1),
        _number(turn.cache.slots_held),
        _number(turn.cache.slots_saved),
    )


def table(rows: Sequence[Row]) -> str:
    """A table for a terminal: the names to the left, the numbers to the right."""
    headings = [heading.split("\n") for heading in HEADINGS]
    height = max(map(len, headings))
    header = [tuple(lines[i] if i < len(lines) else "" for lines in headings) for i in range(height)]
    body = [cells(name, turn) for name, turn in rows]
    widths = [max(len(line[column]) for line in (*header, *body)) for column in range(len(HEADINGS))]
    rule = "  ".join("-" * width for width in widths)
    lines = [_line(line, widths) for line in header] + [rule] + [_line(line, widths) for line in body]
    return "\n".join(lines)


def legend(rows: Sequence[Row]) -> str:
    """What the columns mean, and how the last row reads against stock SGLang."""
    last = rows[-1][1].cache if rows else None
    if last is None or last.slots_held is None or last.slots_saved is None:
        return "slots: - (this server has no compressed cache)"
    stock = last.slots_held + last.slots_saved
    return (
        "A slot is the KV memory of one token in stock SGLang. The cache now holds "
        f"{last.slots_held:,} slots; without compression the same tokens would hold {stock:,}."
    )


@dataclass(frozen=True)
class _Series:
    label: str
    colour: str
    values: tuple[int | None, ...]


BAR, GAP, LEFT, TOP, PLOT = 22, 26, 64, 70, 220  # pixels


def picture(rows: Sequence[Row], title: str) -> str:
    """An SVG bar chart: per turn, the prompt, the part of it that was cached, and the slots that the cache holds."""
    turns = [turn for _, turn in rows]
    series = (
        _Series("prompt tokens", "#9aa4b2", tuple(turn.prompt_tokens for turn in turns)),
        _Series("of them cached", "#3b82c4", tuple(turn.cached_tokens for turn in turns)),
        _Series("slots held by the cache", "#2f9e62", tuple(turn.cache.slots_held for turn in turns)),
    )
    group = BAR * len(series) + GAP
    width, height = max(LEFT + group * len(rows) + 20, 560), TOP + PLOT + 50
    highest = _axis_end(max((value for each in series for value in each.values if value is not None), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#1f2933">{escape(title)}</text>',
    ]
    for index, each in enumerate(series):
        x = LEFT + index * 160
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{each.colour}"/>')
        parts.append(f'<text x="{x + 18}" y="48" fill="#1f2933">{each.label}</text>')
    for step in range(5):
        y = TOP + PLOT - PLOT * step / 4
        label = f"{highest * step / 4:,.0f}"
        parts.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#52606d">{label}</text>')
    for position, (name, _) in enumerate(rows):
        left = LEFT + GAP / 2 + position * group
        for index, each in enumerate(series):
            value = each.values[position]
            if value is None:
                continue
            size = PLOT * value / highest
            parts.append(
                f'<rect x="{left + index * BAR:.1f}" y="{TOP + PLOT - size:.1f}" width="{BAR - 3}" height="{size:.1f}" '
                f'fill="{each.colour}"><title>{escape(name)}: {value:,} {each.label}</title></rect>'
            )
        middle, below = left + BAR * len(series) / 2, TOP + PLOT + 20
        parts.append(f'<text x="{middle:.1f}" y="{below}" text-anchor="middle" fill="#1f2933">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis_end(value: int) -> int:
    """The least round number of at least ``value`` whose quarters are round too."""
    unit = 4
    while True:
        for factor in (1, 2, 5):
            if unit * factor >= value:
                return unit * factor
        unit *= 10


def _number(value: float | int | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (text.rjust(width) for text, width in zip(texts, widths, strict=True))
    return "  ".join([texts[0].ljust(len(first)), *rest]).rstrip()
