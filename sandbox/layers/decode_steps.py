"""Decode steps at fixed addresses, as a captured graph needs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.layers.step import DecodeInputs, Step, on_device, packed, placed
from sandbox.planner import PAD_SLOT, ContextParallel, DecodePlanner
from sandbox.planner.batch import block_ids
from sandbox.planner.counts import positive


class DecodeSteps:
    """The inputs of decode steps at fixed addresses, for a captured graph.

    Capture a layer's call with `step`; before every replay, call `update`. A padded request has
    `seq_lens` 0 and slot -1: it reads no key, writes no row, and its output is 0.

    Args:
        max_requests, query_len, block_size, num_blocks: as for `DecodePlanner`.
        columns: of the block table.
        like: an array of any kind on the device where the graph will run; None is the CPU.
        parallel, rank: how contexts are spread over ranks, and which one this is; `block_size` is
            that of one rank.
        causal: whether several new tokens of a request see only earlier ones.

    Raises:
        TypeError, ValueError: `like` is no array, a number is no positive integer, or parallel's
            block size is another, or it has no such rank.
    """

    def __init__(
        self,
        max_requests: int,
        query_len: int = 1,
        *,
        columns: int,
        block_size: int,
        num_blocks: int | None = None,
        like: Any = None,
        parallel: ContextParallel | None = None,
        rank: int = 0,
        causal: bool = True,
    ) -> None:
        self._planner = DecodePlanner(
            max_requests, query_len, block_size=block_size, num_blocks=num_blocks
        )
        positive(columns=columns)
        if parallel is not None:
            if parallel.block_size != block_size:
                raise ValueError(
                    f"block_size is {block_size}, but parallel's is {parallel.block_size}"
                )
            parallel.local_lens(0, rank)
        self._causal, self._like = causal, like
        tokens = max_requests * query_len
        rows, width = (max_requests, query_len) if parallel is None else (tokens, 1)
        blank = Step(
            num_tokens=tokens,
            positions=np.zeros(tokens, np.int64),
            slot_mapping=np.full(tokens, PAD_SLOT, np.int64),
            decode=DecodeInputs(
                tokens=tokens,
                query_len=width,
                block_table=np.zeros((rows, columns), np.int32),
                seq_lens=np.zeros(rows, np.int32),
                causal=causal,
                padding=np.ones(rows, np.int32),
            ),
            prefill=None,
            block_size=block_size,
            parallel=parallel,
            rank=rank,
        )
        self._packed = packed(blank)
        self._host = placed(blank, self._packed)
        moved = on_device(self._packed, like)
        self._buffer = moved.buffer
        self.step = placed(blank, moved)

    def update(self, context_lens: Any, block_table: np.ndarray) -> Step:
        """Plan the decodes of requests with so many cached tokens; the others are padding.

        Args:
            context_lens: integers `[B]`, `B <= max_requests`.
            block_table: int32 `[>= B, columns]` of block ids, in CPU memory.

        Returns:
            `step`, whose arrays are written on the current stream of the library of `like`.

        Raises:
            TypeError, ValueError: as `DecodePlanner.plan`, a table of other columns, or one that
                has no block for a new token.
        """
        requests, columns = len(context_lens), self._host.decode.block_table.shape[1]
        block_table = np.ascontiguousarray(block_ids(block_table, requests))
        if block_table.shape[1] != columns:
            raise ValueError(
                f"block_table has shape {block_table.shape}, expected {columns} columns"
            )
        # Over ranks the slots are not the planner's: it finds none in a table without columns.
        table = block_table if self._host.parallel is None else block_table[:, :0]
        planned = self._planner.plan(context_lens, table)
        request = np.repeat(np.arange(requests), self._planner.query_len)
        slots = self._slots(block_table, request, planned)
        host, tokens = self._host, len(request)
        host.positions[...] = planned["positions"]
        host.slot_mapping[...] = PAD_SLOT
        host.slot_mapping[:tokens] = slots
        self._fill_decode(block_table, request, planned)
        if self._buffer is not self._packed.buffer:
            with arrays.borrow({"like": self._like}):
                self._buffer.set(self._packed.buffer)
        return self.step

    def _slots(self, block_table: np.ndarray, request: np.ndarray, planned: Any) -> np.ndarray:
        host, tokens = self._host, len(request)
        if host.parallel is not None:
            return host.parallel.slot_mapping(
                block_table,
                request,
                planned["positions"][:tokens],
                host.rank,
                num_blocks=self._planner.num_blocks,
            )
        slots = planned["slot_mapping"][:tokens]
        if tokens and int(slots.min()) == PAD_SLOT:
            token = int(slots.argmin())
            raise ValueError(
                f"request {int(request[token])} has a new token at position "
                f"{int(planned['positions'][token])}, for which its row of block_table has no block"
            )
        return slots

    def _fill_decode(self, block_table: np.ndarray, request: np.ndarray, planned: Any) -> None:
        """Tables, lengths and what is padding: of requests, or of tokens over several ranks."""
        inputs, parallel = self._host.decode, self._host.parallel
        rows = np.arange(len(request) // self._planner.query_len) if parallel is None else request
        seen = planned["seq_lens"][rows]
        if parallel is not None:
            if self._causal:
                seen = planned["positions"][: len(request)] + 1
            seen = parallel.local_lens(seen, self._host.rank)
        inputs.block_table[: len(rows)] = block_table[rows]
        inputs.seq_lens[...] = 0
        inputs.seq_lens[: len(rows)] = seen
        inputs.padding[...] = 1
        inputs.padding[: len(rows)] = 0
