"""Counters of the cache: what was done since the start, and what is held now."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from laprox_sglang.cache.segment import Segment


@dataclass
class CacheStats:
    """The plain counters survive a flush; the ``segment*`` ones follow the tree.

    Units: tokens are positions of a sequence, slots are what the allocator hands out, entries are kept
    (layer, kv head, token) triples, rescores are compressions of an answer while it was written. Seconds are host time
    spent launching (on a CPU: doing) compression: ``compress_seconds`` while requests run, ``finish_seconds`` for what
    they leave behind.
    """

    compressions: int = 0
    tokens_compressed: int = 0
    entries_kept: int = 0
    entries_dropped: int = 0
    splits: int = 0
    rescores: int = 0
    compress_seconds: float = 0.0
    finish_seconds: float = 0.0
    segments: int = 0
    segment_tokens: int = 0
    segment_slots: int = 0

    @property
    def slots_saved(self) -> int:
        """Slots that the compressed tokens now in the tree would hold besides, were they dense."""
        return self.segment_tokens - self.segment_slots

    def compressed(self, segment: Segment, rows_per_slot: int) -> None:
        self.compressions += 1
        self.tokens_compressed += segment.tokens
        self.entries_kept += segment.entries
        self.entries_dropped += segment.tokens * rows_per_slot - segment.entries
        self._hold(segment, 1)

    def split(self, whole: Segment, left: Segment, right: Segment) -> None:
        self.splits += 1
        self._hold(whole, -1)
        self._hold(left, 1)
        self._hold(right, 1)

    def dropped(self, segment: Segment) -> None:
        self._hold(segment, -1)

    def clear_held(self) -> None:
        self.segments = self.segment_tokens = self.segment_slots = 0

    def to_dict(self) -> dict[str, float | int]:
        return {**asdict(self), "slots_saved": self.slots_saved}

    def _hold(self, segment: Segment, sign: int) -> None:
        self.segments += sign
        self.segment_tokens += sign * segment.tokens
        self.segment_slots += sign * segment.slots.shape[0]
