"""Which rank holds which token of a context, and how gathered shards become whole again.

Tokens go round the ranks in runs of `interleave`: token `t` belongs to rank
`t // interleave % world_size`. Every rank has the same block table; a block holds `block_size` of
the rank's own tokens, so that a column of the table stands for `block_size * world_size` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.planner.batch import PAD_SLOT, offsets, require_policy, slot_mapping
from sandbox.planner.counts import positive
from sandbox.planner.pieces import RowPadding


@dataclass(frozen=True)
class ContextParallel:
    """How contexts are spread over ranks.

    Args:
        world_size: ranks, any number.
        interleave: consecutive tokens that stay together.
        block_size: tokens of one rank in a block of its cache.

    Raises:
        TypeError, ValueError: one of them is no integer, or not positive.
    """

    world_size: int
    interleave: int = 1
    block_size: int = 64

    def __post_init__(self) -> None:
        sizes = {"interleave": self.interleave, "block_size": self.block_size}
        positive(world_size=self.world_size, **sizes)

    @property
    def alignment(self) -> int:
        """Tokens at whose multiples a context may be split so that each rank's part is whole
        blocks and whole runs."""
        run = self.world_size * self.interleave
        return math.lcm(self.block_size * self.world_size, run)

    @property
    def padding(self) -> RowPadding:
        """Rows of one rank's workspace for a context: as many on each rank."""
        return RowPadding(self.alignment, self.alignment // self.world_size)

    def owner(self, positions: Any) -> Any:
        """Rank that holds each position."""
        return _integers(positions, "positions") // self.interleave % self.world_size

    def local_positions(self, positions: Any) -> Any:
        """Place of each position among the tokens of its rank."""
        positions = _integers(positions, "positions")
        run = self.world_size * self.interleave
        return positions // run * self.interleave + positions % self.interleave

    def local_lens(self, lens: Any, rank: int) -> np.ndarray:
        """Tokens of `rank` in contexts of these lengths, in the shape of `lens`.

        A query of a causal block that sees the first `n` tokens sees `local_lens(n, rank)` there.

        Raises:
            TypeError, ValueError: no integers, a negative length, or no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {self.world_size - 1}")
        whole, rest = np.divmod(_integers(lens, "lens"), self.world_size * self.interleave)
        mine = np.clip(rest - rank * self.interleave, 0, self.interleave)
        return whole * self.interleave + mine

    def all_local_lens(self, lens: Any) -> np.ndarray:
        """Tokens of every rank, `[..., world_size]`."""
        return np.stack([self.local_lens(lens, rank) for rank in range(self.world_size)], axis=-1)

    def columns_needed(self, lens: Any) -> np.ndarray:
        """Columns of the block table for contexts of these lengths: those of the padded rows that
        a rank gathers, the last of which may hold none of its tokens."""
        return -(-self.padding.needed(_integers(lens, "lens")) // self.block_size)

    def slot_mapping(
        self,
        block_table: np.ndarray,
        requests: np.ndarray,
        positions: np.ndarray,
        rank: int,
        *,
        num_blocks: int | None = None,
        out_of_range: str = "error",
    ) -> np.ndarray:
        """int64 `[T]`: slots in the cache of `rank`, `PAD_SLOT` for tokens of other ranks."""
        self.local_lens(0, rank)
        require_policy(out_of_range)
        requests, positions = _integers(requests, "requests"), _integers(positions, "positions")
        if requests.shape != positions.shape:
            raise ValueError(
                f"requests has shape {requests.shape}, expected {positions.shape} as positions"
            )
        slots = np.full(len(positions), PAD_SLOT, np.int64)
        mine = self.owner(positions) == rank
        slots[mine] = slot_mapping(
            block_table,
            requests[mine],
            self.local_positions(positions[mine]),
            self.block_size,
            num_blocks=num_blocks,
            out_of_range="pad",
        )
        lost = mine & (slots == PAD_SLOT)
        if out_of_range == "error" and lost.any():
            token = int(np.argmax(lost))
            raise ValueError(
                f"token {token} of request {int(requests[token])} has position "
                f"{int(positions[token])}, for which rank {rank} has no block in block_table"
            )
        return slots

    def local_starts(self, starts: Any) -> np.ndarray:
        """Where a rank's part of a chunk begins among its own tokens; starts must be aligned.

        Raises:
            ValueError: one is not.
        """
        starts = _integers(starts, "starts")
        if (starts % self.alignment).any():
            place = int(np.argmax(starts % self.alignment != 0))
            raise ValueError(
                f"starts[{place}] is {int(starts[place])}, expected multiples of {self.alignment}"
            )
        return starts // self.world_size

    def empty_shards(self, lens: Any) -> np.ndarray:
        """bool `[B, world_size]`: ranks without a token of a request, whose LSE must be -inf."""
        return self.all_local_lens(lens) == 0

    def reorganise(self, starts: Any, lens: Any, *, order: str = "token") -> np.ndarray:
        """Rows of gathered shards that make whole contexts, as one index.

        Each rank gathered `padding.needed(lens)` rows a request, one request after the other, from
        `local_starts(starts)` on; an all-gather put the ranks' rows one after the other.

        Args:
            starts, lens: first position, a multiple of `alignment`, and tokens of each request.
            order: `"token"`, as positions run, so that masks stay possible, or `"rank"`, the
                tokens of rank 0 first, then those of rank 1, request by request.

        Returns:
            int64 `[sum(lens)]`: take these rows of the gathered ones; no padding is among them.
        """
        if order not in ("token", "rank"):
            raise ValueError(f"order is {order!r}, expected 'token' or 'rank'")
        lens = _integers(lens, "lens")
        if self.local_starts(starts).shape != lens.shape:
            raise ValueError(f"starts has shape {np.shape(starts)}, expected {lens.shape} as lens")
        local_rows = self.padding.needed(lens)
        shard = offsets(local_rows)
        request = np.repeat(np.arange(len(lens)), lens)
        position = np.arange(len(request)) - np.repeat(offsets(lens)[:-1], lens)
        rank, local = self.owner(position), self.local_positions(position)
        rows = rank * int(shard[-1]) + shard[request] + local
        if order == "rank":
            rows = rows[np.lexsort((local, rank, request))]
        return rows


def _integers(values: Any, name: str) -> np.ndarray:
    """int64, none of them negative: unsigned differences would wrap."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} is {array.dtype}, expected integers")
    array = array.astype(np.int64)
    if array.size and int(array.min()) < 0:
        raise ValueError(f"{name} has {int(array.min())}, expected none below 0")
    return array
