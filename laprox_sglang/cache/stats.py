"""Counters of the cache: what was done since the start, and what is held now."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from laprox_sglang.cache.segment import Segment

# Why a stretch was compressed: a prefill ended; its request finished; an answer grew (rescoring); slots were needed.
PROMPT, ANSWER, RESCORE, PRESSURE = "prompt", "answer", "rescore", "pressure"


class Watcher:
    """Is told what happens in the cache, by the scheduler in the midst of its work: must be quick, and never wait."""

    def compressed(self, node_id: int, kind: str, start: int, segment: Segment, freed: int) -> None:
        """``start`` is the position of the stretch's first token, ``freed`` the slots that became free."""

    def held(self, segment: Segment, sign: int) -> None:
        """The tree holds this segment from now on (``sign`` 1) or no longer (-1)."""

    def timed(self, kind: str, seconds: float) -> None:
        """One call that compressed, perhaps several stretches, took so long."""

    def cleared(self) -> None:
        """The tree was emptied."""

    def changed(self) -> None:
        """Called after any of these, and after requests entered or left the tree."""


@dataclass
class CacheStats:
    """The plain counters survive a flush; the ``segment*`` ones follow the tree.

    Units: tokens are positions of a sequence, slots are what the allocator hands out, entries are kept
    (layer, kv head, token) triples, rescores are compressions of an answer while it was written. Seconds are host time
    spent launching (on a CPU: doing) compression: ``compress_seconds`` at prefill ends, ``rescore_seconds`` while
    answers are written, ``finish_seconds`` for what requests leave behind. ``prompt_tokens`` were asked to be
    prefilled, ``cached_tokens`` of them were found in the tree.
    """

    compressions: int = 0
    tokens_compressed: int = 0
    entries_kept: int = 0
    entries_dropped: int = 0
    splits: int = 0
    rescores: int = 0
    compress_seconds: float = 0.0
    rescore_seconds: float = 0.0
    finish_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    segments: int = 0
    segment_tokens: int = 0
    segment_slots: int = 0
    segment_entries: int = 0

    def __post_init__(self) -> None:
        self.watchers: list[Watcher] = []

    @property
    def slots_saved(self) -> int:
        """Slots that the compressed tokens now in the tree would hold besides, were they dense."""
        return self.segment_tokens - self.segment_slots

    def compressed(self, node_id: int, kind: str, start: int, segment: Segment, freed: int, rows_per_slot: int) -> None:
        self.compressions += 1
        self.rescores += kind == RESCORE
        self.tokens_compressed += segment.tokens
        self.entries_kept += segment.entries
        self.entries_dropped += segment.tokens * rows_per_slot - segment.entries
        self._hold(segment, 1)
        for watcher in self.watchers:
            watcher.compressed(node_id, kind, start, segment, freed)
        self.changed()

    def timed(self, kind: str, seconds: float) -> None:
        if kind == PROMPT:
            self.compress_seconds += seconds
        elif kind == RESCORE:
            self.rescore_seconds += seconds
        else:
            self.finish_seconds += seconds
        for watcher in self.watchers:
            watcher.timed(kind, seconds)

    def split(self, whole: Segment, left: Segment, right: Segment) -> None:
        self.splits += 1
        self._hold(whole, -1)
        self._hold(left, 1)
        self._hold(right, 1)
        self.changed()

    def dropped(self, segment: Segment) -> None:
        """The caller calls ``changed`` when it has dropped all that it drops."""
        self._hold(segment, -1)

    def clear_held(self) -> None:
        self.segments = self.segment_tokens = self.segment_slots = self.segment_entries = 0
        for watcher in self.watchers:
            watcher.cleared()
        self.changed()

    def changed(self) -> None:
        for watcher in self.watchers:
            watcher.changed()

    def to_dict(self) -> dict[str, float | int]:
        return {**asdict(self), "slots_saved": self.slots_saved}

    def _hold(self, segment: Segment, sign: int) -> None:
        self.segments += sign
        self.segment_tokens += sign * segment.tokens
        self.segment_slots += sign * segment.slots.shape[0]
        self.segment_entries += sign * segment.entries
        for watcher in self.watchers:
            watcher.held(segment, sign)
