"""``laprox-sglang top``: what ``/laprox`` shows, in a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laprox_sglang.observe.schema import Compression, KeptMaps, ReplicaHistory, ReplicaStats, Segments, Stats
from laprox_sglang.observe.schema import History as HistoryReply

HEAT = ((38, 50, 60), (20, 82, 93), (28, 150, 143), (125, 219, 172), (253, 246, 178))
BARS = " ▁▂▃▄▅▆▇█"
SHADES = "·░▒▓█"


class TopError(RuntimeError):
    """The server did not answer as expected; the message says what to do."""


class Source:
    """Reads the endpoints of a server. Raises TopError."""

    def __init__(self, url: str, api_key: str | None):
        self.url = url.rstrip("/").removesuffix("/v1")
        if "://" not in self.url:
            self.url = "http://" + self.url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)

    def get(self, path: str) -> bytes:
        try:
            reply = self._http.get(f"/laprox/{path}")
        except httpx.HTTPError as error:
            raise TopError(f"no answer from {self.url} ({type(error).__name__}: {error}); is the server up?") from error
        if reply.status_code == 401:
            raise TopError("the server asks for its admin key, or its key where it has no other; give --api-key")
        if reply.status_code == 404:
            raise TopError(f"{self.url} has no compressed cache; start it with `laprox-sglang serve`")
        if reply.status_code != 200:
            raise TopError(f"{self.url}/laprox/{path} answered {reply.status_code}: {reply.text[:200]}")
        return reply.content

    def close(self) -> None:
        self._http.close()


def run(url: str, *, api_key: str | None, interval: float, once: bool, console: Console | None = None) -> int:
    """Draw until Ctrl-C; ``once`` prints one picture and returns."""
    console = console or Console()
    source = Source(url, api_key)
    try:
        if once:
            console.print(picture(source))
            return 0
        with Screen(picture(source), console=console, screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(interval)
                screen.update(picture(source), refresh=True)
    finally:
        source.close()


def picture(source: Source) -> RenderableType:
    stats = Stats.model_validate_json(source.get("stats"))
    maps = {each.replica: each for each in KeptMaps.model_validate_json(source.get("map")).replicas}
    found = Segments.model_validate_json(source.get("segments?limit=8"))
    history = {each.replica: each for each in HistoryReply.model_validate_json(source.get("history")).replicas}
    listed = {each.replica: each for each in found.replicas}
    parts: list[RenderableType] = [
        Text.assemble(("LaProx ", "bold"), (stats.model, "cyan"), f"  {source.url}  {time.strftime('%H:%M:%S')}")
    ]
    for each in stats.replicas:
        if len(stats.replicas) > 1:
            parts.append(Text(f"replica {each.replica}", style="bold"))
        parts.append(_numbers(each))
        number = each.replica
        parts.append(_memory(history[number]))
        parts.append(_heat(maps[number].kept, maps[number].tokens))
        parts.append(_segments(listed[number].segments))
        parts.append(_compressions(history[number].compressions[-5:]))
    return Group(*parts)


def _numbers(stats: ReplicaStats) -> RenderableType:
    table = Table.grid(padding=(0, 3), expand=True)
    table.add_column()
    table.add_column()
    held = f"[bold]{stats.slots_held:,}[/] slots hold [bold]{stats.tokens_cached:,}[/] tokens"
    factor = f", {stats.tokens_cached / stats.slots_held:.1f}x less" if stats.slots_saved else ""
    rate = f"{stats.cached_tokens / stats.prompt_tokens:.1%}" if stats.prompt_tokens else "-"
    seconds = stats.compress_seconds + stats.rescore_seconds + stats.finish_seconds
    each = f"{1000 * seconds / stats.compressions:.0f} ms each" if stats.compressions else "-"
    table.add_row(held + factor, f"[bold]{stats.slots_saved:,}[/] slots saved now")
    table.add_row(
        ProgressBar(total=stats.slots_total, completed=stats.slots_held, width=40),
        f"{stats.slots_held / stats.slots_total:.1%} of {stats.slots_total:,} slots",
    )
    table.add_row(
        f"prefix hit rate [bold]{rate}[/] of {stats.prompt_tokens:,} prompt tokens",
        f"[bold]{stats.compressions:,}[/] compressions, {each}; {stats.rescores:,} of growing answers",
    )
    table.add_row(
        f"entries kept {stats.entries_kept:,}, dropped {stats.entries_dropped:,}",
        f"nodes: {stats.nodes.dense:,} dense, {stats.nodes.compressed:,} compressed; {stats.splits:,} splits",
    )
    return Panel(table, title="now", title_align="left", border_style="dim")


def _memory(history: ReplicaHistory, width: int = 60) -> RenderableType:
    samples = history.samples[-width:]
    if not samples:
        return Panel("nothing has happened yet", title="memory", title_align="left", border_style="dim")
    highest = max(1, *(each.tokens for each in samples))
    lines = Text()
    for name, style, values in (
        ("held    ", "cyan", [each.slots for each in samples]),
        ("stock   ", "bright_black", [each.tokens for each in samples]),
    ):
        bars = "".join(BARS[-(-value * (len(BARS) - 1) // highest)] for value in values)
        lines.append(name).append(bars, style=style).append(f" {values[-1]:,} slots\n")
    lines.rstrip()
    return Panel(lines, title="slots over time, a bar per change", title_align="left", border_style="dim")


def _heat(kept: list[list[int]] | None, tokens: int) -> RenderableType:
    title = f"kept entries per layer (across) and KV head (down), of {tokens:,} compressed tokens"
    if not kept or not tokens:
        return Panel("nothing is compressed yet", title=title, title_align="left", border_style="dim")
    highest = max(1, *(value for layer in kept for value in layer))
    text = Text()
    wide = 2 if len(kept) <= 40 else 1
    for head in range(len(kept[0])):
        text.append(f"head {head:<3}")
        for layer in kept:
            text.append(*cell(layer[head] / highest, wide))
        text.append(f"  {sum(layer[head] for layer in kept):,}\n")
    text.append("0 ")
    for step in range(20):
        text.append(*cell(step / 19, 1))
    text.append(f" {highest:,} entries")
    return Panel(text, title=title, title_align="left", border_style="dim")


def cell(share: float, width: int) -> tuple[str, str]:
    """Shaded too, for terminals without colours."""
    shade = SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))]
    return shade * width, f"rgb({','.join(map(str, colour(share)))})"


def colour(share: float) -> tuple[int, int, int]:
    place = min(1.0, max(0.0, share)) * (len(HEAT) - 1)
    index = min(len(HEAT) - 2, int(place))
    low, high = HEAT[index], HEAT[index + 1]
    red, green, blue = (round(a + (b - a) * (place - index)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _segments(segments: Sequence) -> RenderableType:  # type: ignore[type-arg]
    table = Table(expand=True, box=None, pad_edge=False, header_style="dim")
    for name in ("largest segments", "from token", "tokens", "slots", "kept", "hits", "age, s"):
        table.add_column(name, justify="left" if name == "largest segments" else "right")
    for each in segments:
        start = "?" if each.start is None else f"{each.start:,}"
        table.add_row(
            f"#{each.id}", start, f"{each.tokens:,}", f"{each.slots:,}", f"{each.ratio:.1%}", str(each.hits),
            f"{each.age:,.0f}",
        )  # fmt: skip
    return Panel(table, border_style="dim")


def _compressions(compressions: Sequence[Compression]) -> RenderableType:
    lines = [
        f"{time.strftime('%H:%M:%S', time.localtime(each.time))}  {each.kind:<8}  {each.tokens:>7,} tokens -> "
        f"{each.slots:>6,} slots, {each.freed:,} freed"
        for each in reversed(compressions)
    ]
    return Panel("\n".join(lines) or "none yet", title="last compressions", title_align="left", border_style="dim")
