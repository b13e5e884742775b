"""The plan of a decode step, made again and again in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.planner.batch import MOST, PAD_SLOT
from sandbox.planner.counts import positive
from sandbox.planner.packed import Packed, pack


class DecodePlanner:
    """Positions, slots and lengths of decode steps for a fixed number of padded requests.

    Every call fills the same buffer, so that a captured graph finds it where it was, and allocates
    nothing that grows with the batch. Padding requests have `query_len` tokens each, as the graph
    was captured with, with slot `PAD_SLOT` and `seq_lens` 0.

    Args:
        max_requests: requests of the padded batch.
        query_len: new tokens of each request: 1, or 1 and the speculated ones.
        block_size: rows of a cache block.
        num_blocks: block ids from here on are out of range; None is any id not negative.
    """

    def __init__(
        self,
        max_requests: int,
        query_len: int = 1,
        *,
        block_size: int,
        num_blocks: int | None = None,
    ) -> None:
        positive(max_requests=max_requests, query_len=query_len, block_size=block_size)
        self.max_requests, self.query_len = max_requests, query_len
        self.block_size = block_size
        if num_blocks is not None and num_blocks < 0:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 0")
        self.num_blocks = np.iinfo(np.int64).max if num_blocks is None else num_blocks
        tokens = max_requests * query_len
        self.packed: Packed = pack(
            {
                "positions": np.zeros(tokens, np.int64),
                "slot_mapping": np.full(tokens, PAD_SLOT, np.int64),
                "query_start_loc": np.arange(0, tokens + 1, query_len, dtype=np.int32),
                "seq_lens": np.zeros(max_requests, np.int32),
            }
        )
        self._offsets = np.arange(query_len)
        self._request = np.repeat(np.arange(max_requests), query_len)
        self._column, self._flat = (np.empty(tokens, np.int64) for _ in range(2))
        self._block = np.empty(tokens, np.int32)
        self._known, self._also = (np.empty(tokens, bool) for _ in range(2))

    def plan(self, context_lens: Any, block_table: np.ndarray) -> Packed:
        """Fill the buffer for requests with so many cached tokens; the rest is padding.

        Args:
            context_lens: integers `[B]`, `B <= max_requests`.
            block_table: int32 `[>= B, columns]`, contiguous, of block ids. A token whose block it
                does not hold gets `PAD_SLOT`.

        Returns:
            `self.packed`: `positions` and `slot_mapping` `[max_requests * query_len]`,
            `query_start_loc` `[max_requests + 1]`, `seq_lens` `[max_requests]`, 0 for padding.

        Raises:
            TypeError, ValueError: more requests than there is room for, or no such table.
        """
        context_lens = np.asarray(context_lens)
        requests = len(context_lens)
        if requests and context_lens.dtype.kind not in "iu":
            raise TypeError(f"context_lens is {context_lens.dtype}, expected integers")
        if requests and not 0 <= int(context_lens.min()) <= int(context_lens.max()) <= (
            MOST - self.query_len
        ):
            raise ValueError(
                f"context_lens run from {int(context_lens.min())} to {int(context_lens.max())}, "
                f"expected 0 to {MOST - self.query_len}"
            )
        if requests > self.max_requests:
            raise ValueError(f"context_lens has {requests} requests, room is {self.max_requests}")
        if block_table.dtype != np.int32 or not block_table.flags.c_contiguous:
            raise TypeError(f"block_table is {block_table.dtype}, expected contiguous int32")
        if block_table.ndim != 2 or len(block_table) < requests:
            raise ValueError(f"block_table has shape {block_table.shape}, expected [>= B, columns]")
        count, columns = requests * self.query_len, block_table.shape[1]
        positions, slots = self.packed["positions"], self.packed["slot_mapping"]
        seq_lens = self.packed["seq_lens"]
        positions[count:], slots[:], seq_lens[requests:] = 0, PAD_SLOT, 0
        np.add(context_lens, self.query_len, out=seq_lens[:requests], casting="unsafe")
        here = positions[:count]
        by_request = here.reshape(requests, self.query_len)
        by_request[...] = context_lens[:, None]
        by_request += self._offsets
        if not count or not columns:
            return self.packed
        column, flat, block = self._column[:count], self._flat[:count], self._block[:count]
        known, also = self._known[:count], self._also[:count]
        np.floor_divide(here, self.block_size, out=column)
        np.less(column, columns, out=known)
        np.minimum(column, columns - 1, out=column)
        np.multiply(self._request[:count], columns, out=flat)
        np.add(flat, column, out=flat)
        np.take(block_table.reshape(-1), flat, out=block, mode="clip")  # "raise" would buffer
        np.logical_and(known, np.greater_equal(block, 0, out=also), out=known)
        np.logical_and(known, np.less(block, self.num_blocks, out=also), out=known)
        np.remainder(here, self.block_size, out=column)
        np.multiply(block, self.block_size, out=flat, dtype=np.int64)
        np.add(flat, column, out=flat)
        np.copyto(slots[:count], flat, where=known)
        return self.packed
