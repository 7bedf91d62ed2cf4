"""A node of the tree: dense (every row of every token, in the token's own slot) or compressed (a segment)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from laprox_sglang.cache.segment import Segment


class LaProxNode(TreeNode):
    """``key`` counts tokens, ``slots_held`` counts slots.

    Attributes:
        segment: None while the node is dense. ``value`` then holds the tokens' slots; of a compressed node it holds
            zeros (SGLang's padding slot), which is what a request's row says at compressed positions.
        owner: id of the request that computed the tokens. Only it may compress them while it runs.
        due: a compression of this node was due but another request held it; whoever releases it last makes up for it.
        held_back: a selection (positions, indptr) that was scored but not applied: the node is short and dense.
        version: grows whenever the node's rows move, so that page tables built from it are made anew.
    """

    def __init__(self, priority: int = 0, owner: str | None = None):
        super().__init__(priority=priority)
        self.segment: Segment | None = None
        self.owner = owner
        self.due = False
        self.held_back: tuple[torch.Tensor, torch.Tensor] | None = None
        self.version = 0
        self.table: PathTable | None = None

    @property
    def slots_held(self) -> int:
        return len(self.value) if self.segment is None else self.segment.slots.shape[0]

    @property
    def tokens(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class PathTable:
    """The listed rows of a path from the root to its deepest compressed node.

    Attributes:
        rows: ``[R]`` int32 row ids, ordered by (layer, head, position).
        indptr: ``[L * H + 1]`` int64, offsets of the lists in ``rows``.
        end: first token position after the listed part; the tokens from there on are dense.
        signature: (node id, version) along the path.
        epoch: tree epoch at which the signature was last found unchanged.
    """

    rows: torch.Tensor
    indptr: torch.Tensor
    end: int
    signature: tuple[tuple[int, int], ...]
    epoch: int

    @cached_property
    def host_indptr(self) -> np.ndarray:
        """``indptr`` on the host. On a GPU the first read waits for the device, so it is read only where needed."""
        return self.indptr.cpu().numpy()

    def at(self, epoch: int) -> PathTable:
        """The same table, found unchanged at a later epoch."""
        later = replace(self, epoch=epoch)
        if "host_indptr" in self.__dict__:
            later.__dict__["host_indptr"] = self.host_indptr
        return later


def joined_key(first: RadixKey, second: RadixKey) -> RadixKey:
    return RadixKey(
        first.raw_token_ids() + second.raw_token_ids(), extra_key=first.extra_key, cache_salt=first.cache_salt
    )
