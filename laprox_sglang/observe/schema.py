"""What ``/laprox/*`` answers. No prompt text, no token ids, no request ids, no cache salts: sizes and times only.

Units: a token is a position of a sequence; a slot is the KV memory of one dense token, all layers and heads; an entry
is one kept (layer, kv head, token). Times are seconds; ``time`` is seconds since 1970, ages are seconds before now.
With tensor parallelism a replica's layers x heads are those of its first rank.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

Order = Literal["largest", "hottest", "recent"]
Kind = Literal["prompt", "answer", "rescore", "pressure"]
NodeKind = Literal["dense", "compressed", "held_back"]


class Nodes(BaseModel):
    """Nodes of the radix tree by kind."""

    dense: int
    compressed: int
    held_back: int = Field(description="of the dense ones: scored already, compressed when slots are needed")


class ReplicaStats(BaseModel):
    """One data parallel replica. Counters run since the server started; what is held is as of now."""

    replica: int = 0
    policy: str
    score: str
    allocation: str
    kernels: str = Field(description="what computes attention over kept entries")
    cuda_graphs: str
    ratio: float | None
    budget_tokens: int | None
    window: int
    sink: int
    min_tokens: int
    rescore_interval: int
    pool_kernel: int
    layers: int
    kv_heads: int
    slots_total: int
    slots_free: int
    slots_held: int = Field(description="slots that the tree holds")
    tokens_cached: int = Field(description="tokens in the tree: the slots that they would hold without compression")
    slots_saved: int
    segments: int
    segment_tokens: int
    segment_slots: int
    segment_entries: int = Field(description="entries that the compressed nodes hold now")
    nodes: Nodes
    compressions: int
    tokens_compressed: int
    entries_kept: int
    entries_dropped: int
    splits: int
    rescores: int
    compress_seconds: float
    rescore_seconds: float
    finish_seconds: float
    prompt_tokens: int
    cached_tokens: int = Field(description="of the prompt tokens: found in the tree")
    refused_modes: list[str]


class Stats(BaseModel):
    model: str
    version: str
    time: float
    replicas: list[ReplicaStats]


class Segment(BaseModel):
    """A compressed node of the tree."""

    id: int
    start: int | None = Field(description="position of its first token; null when its path is too long to walk")
    tokens: int
    slots: int
    ratio: float = Field(description="slots per token")
    hits: int = Field(description="requests that had it in their path, the one that computed it included")
    age: float
    idle: float = Field(description="seconds since a request last matched it")
    kept: list[list[int]] | None = Field(description="kept entries [layer][kv head]; null while they are being fetched")


class ReplicaSegments(BaseModel):
    replica: int
    nodes: int
    scanned: int = Field(description="nodes that were looked at: the newest ones of a very large tree")
    segments: list[Segment]


class Segments(BaseModel):
    order: Order
    replicas: list[ReplicaSegments]


class Stretch(BaseModel):
    """One node on a conversation's path."""

    id: int
    kind: NodeKind
    start: int
    tokens: int
    slots: int
    hits: int
    age: float
    idle: float


class Conversation(BaseModel):
    """A path from the root to a leaf, in the order in which it was said."""

    id: int = Field(description="id of its leaf")
    tokens: int = Field(description="of the listed stretches, as the slots")
    slots: int
    idle: float
    stretches: list[Stretch]
    truncated: bool = Field(description="its path is long: only its end is listed")


class ReplicaConversations(BaseModel):
    replica: int
    conversations: list[Conversation]


class Conversations(BaseModel):
    """The most recently used ones."""

    replicas: list[ReplicaConversations]


class KeptMap(BaseModel):
    """Kept entries per layer and KV head over all compressed nodes now in the tree."""

    replica: int
    tokens: int
    kept: list[list[int]] | None


class KeptMaps(BaseModel):
    replicas: list[KeptMap]


class Strip(BaseModel):
    """Which positions of a segment survive, in equal bins of ``tokens_per_bin`` tokens (the last may be shorter).

    ``share`` is 0 to 1 for each bin: kept entries over all entries, of one list where a layer and head were asked for.
    """

    tokens_per_bin: int
    share: list[float]


class SegmentDetail(BaseModel):
    replica: int
    segment: Segment
    layer: int | None = None
    head: int | None = None
    strip: Strip | None = Field(description="null while it is being counted: ask again")


class Compression(BaseModel):
    """One compressed stretch. ``number`` counts from 1 for each replica."""

    replica: int = 0
    number: int
    time: float
    kind: Kind
    node: int
    start: int
    tokens: int
    slots: int
    freed: int
    entries: int


class Sample(BaseModel):
    """The cache at one moment: ``slots`` held, and ``tokens`` that would be slots without compression."""

    time: float
    slots: int
    tokens: int


class ReplicaHistory(BaseModel):
    replica: int
    samples: list[Sample]
    compressions: list[Compression]


class History(BaseModel):
    replicas: list[ReplicaHistory]


class Live(BaseModel):
    """One server-sent event of ``/laprox/events``: the counters and what was compressed since the event before."""

    time: float
    replicas: list[ReplicaStats]
    compressions: list[Compression]
