"""A paged cache's blocks: shared by requests with the same prefix, kept until room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Holding:
    """What one request holds: shared groups by key, and blocks of its own.

    Attributes:
        blocks: int32 ids in the order of the request's positions.
        cached_tokens: tokens at its start that were in the cache already.
    """

    blocks: np.ndarray
    cached_tokens: int
    keys: tuple[int, ...] = ()
    own: list[int] = field(default_factory=list)


class BlockPool:
    """Blocks of `block_size` tokens; prefixes are shared by groups of `group` tokens.

    A prompt's whole groups are known by a key (a hash of all tokens up to their end). Others share
    a group once its tokens are computed. A group that nobody holds stays in the cache until its
    blocks are needed: the one used longest ago goes first, and of one prompt the last.

    Args:
        num_blocks: blocks of the cache.
        block_size: tokens of a block.
        group: tokens of a group, a multiple of `block_size`.

    Raises:
        ValueError: a number is not positive or the group is not whole blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, group: int) -> None:
        if min(num_blocks, block_size, group) < 1 or group % block_size:
            raise ValueError(
                f"num_blocks {num_blocks}, block_size {block_size} and group {group} must be "
                "positive, and a group whole blocks"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.group = group
        self._each = group // block_size
        self._free: list[int] = []
        self._unused = 0  # blocks from here on were never taken
        self._groups: dict[int, list[int]] = {}
        self._computed: set[int] = set()
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evicted = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self._unused - len(self._free) - self.cached_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody holds, kept for a request with the same prefix."""
        return len(self._idle) * self._each

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, keys: Sequence[int], prompt_tokens: int, tokens: int) -> Holding | None:
        """Blocks for a request that will have so many tokens, or None while there is no room.

        Its leading groups that are in the cache are shared, though never its whole prompt: one
        token at least is left to compute. Room is asked for all its tokens, so that it can run to
        its end.
        """
        whole = _distinct(keys[: prompt_tokens // self.group])
        hits = 0
        while hits < len(whole) and whole[hits] in self._computed:
            hits += 1
        shared, new = whole[:hits], whole[hits:]
        if any(key in self._groups for key in new):  # another request is computing them
            new = ()
        kept = len(shared) + len(new)
        own = self.blocks_for(tokens) - kept * self._each
        idle = sum(key in self._idle for key in shared)
        spare = self.num_blocks - self.held_blocks - idle * self._each
        if own + len(new) * self._each > spare:
            return None
        for key in shared:
            self._hold(key)
        for key in new:
            self._groups[key] = self._pop(self._each)
            self._hold(key)
        mine = self._pop(own)
        blocks = [block for key in (*shared, *new) for block in self._groups[key]] + mine
        cached = min(hits * self.group, prompt_tokens - 1)
        return Holding(np.array(blocks, np.int32), cached, (*shared, *new), mine)

    def computed(self, holding: Holding) -> None:
        """The prompt's groups hold their tokens: others may share them from now on."""
        self._computed.update(holding.keys)

    def give_back(self, holding: Holding) -> None:
        """A request ended: its own blocks are free, its groups stay for others."""
        self._free += holding.own
        for key in reversed(holding.keys):  # no group is of use without those before it
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._idle[key] = None

    def _hold(self, key: int) -> None:
        self._idle.pop(key, None)
        self._holders[key] = self._holders.get(key, 0) + 1

    def _pop(self, count: int) -> list[int]:
        while len(self._free) + self.num_blocks - self._unused < count:
            oldest, _ = self._idle.popitem(last=False)
            self._free += self._groups.pop(oldest)
            self._computed.discard(oldest)
            self.evicted += 1
        kept = max(0, len(self._free) - count)
        taken = self._free[kept:]
        del self._free[kept:]
        first, self._unused = self._unused, self._unused + count - len(taken)
        return taken + list(range(first, self._unused))


def _distinct(keys: Sequence[int]) -> tuple[int, ...]:
    """The keys before the first that comes a second time."""
    seen = dict.fromkeys(keys)
    if len(seen) < len(keys):
        seen = {}
        for key in keys:
            if key in seen:
                break
            seen[key] = None
    return tuple(seen)
