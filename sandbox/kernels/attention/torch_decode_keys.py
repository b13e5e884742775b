"""Which keys the queries of a decode see, as torch tensors of shapes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sandbox import arrays


@dataclass
class Keys:
    """Keys of `R` requests, `M` of each, as many as any may have.

    Attributes:
        blocks, offsets: where they are, `[R, M]`, anything where there is none.
        seen: which query sees which, `[R, S, M]`; all False where there is none.
    """

    blocks: Any
    offsets: Any
    seen: Any

    def part(self, first: int, end: int) -> Keys:
        """Those of some of the requests."""
        return Keys(self.blocks[first:end], self.offsets[first:end], self.seen[first:end])


def paged_keys(arguments: dict[str, Any], tokens: int) -> Keys:
    """Keys at the positions that the block table, and `max_seq_len`, have room for."""
    import torch

    block_size = arguments["cache"].shape[1]
    table, lengths = (arrays.to_torch(arguments[name]) for name in ("block_table", "seq_lens"))
    room = table.shape[1] * block_size
    if (longest := arguments["max_seq_len"]) is not None:
        room = min(room, longest)
    positions = torch.arange(room, device=table.device)
    blocks = table[:, positions // block_size].long()
    found = (positions < lengths[:, None]) & (blocks >= 0) & (blocks < len(arguments["cache"]))
    seen = _seen(arguments, positions, lengths.long(), tokens) & found[:, None]
    return Keys(blocks, (positions % block_size).expand_as(blocks), seen)


def _seen(arguments: dict[str, Any], positions: Any, lengths: Any, tokens: int) -> Any:
    """Which query may see which position, `[B, S, M]`, if there is a key."""
    import torch

    queries = torch.arange(tokens, device=positions.device)
    own = lengths[:, None, None] - tokens + queries[:, None]
    seen = positions <= own if arguments["causal"] else torch.ones_like(positions <= own)
    if arguments["tree_mask"] is not None:
        words = arrays.to_torch(arguments["tree_mask"])
        new = positions - (lengths[:, None, None] - tokens)
        bit = new.clamp(0, tokens - 1).expand(-1, tokens, -1)
        seen = (new < 0) | (words.gather(2, bit // 32) >> (bit % 32) & 1 == 1)
    if arguments["window"] is not None:
        seen = seen & (positions > own - arguments["window"])
    return seen


def chosen_keys(arguments: dict[str, Any]) -> Keys:
    """The keys that `indices` name; each query is a request by itself."""
    cache = arguments["cache"]
    slots = arrays.to_torch(arguments["indices"]).flatten(0, 1).long()
    found = (slots >= 0) & (slots < len(cache) * cache.shape[1])
    return Keys(slots // cache.shape[1], slots % cache.shape[1], found[:, None])
