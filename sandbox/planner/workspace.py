"""How many rows of context a pass may gather, and what they take with their up-projections."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sandbox.dims import MLADims
from sandbox.planner.context_parallel import ContextParallel
from sandbox.planner.counts import positive

MOST_ROWS = 64 * 1024


@dataclass(frozen=True)
class Workspace:
    """Rows of context gathered at once, and the bytes that they need.

    Attributes:
        rows: of one pass.
        gather_bytes: the latent rows; with context parallelism the rank's own and all ranks'.
        projected_bytes: what kv_b_proj makes of them, `[rows, N, P + V]`.
        key_bytes: whole keys, `[rows, N, P + R]`, built beside that.
    """

    rows: int
    gather_bytes: int
    projected_bytes: int
    key_bytes: int

    @property
    def up_projection_bytes(self) -> int:
        """K and V as attention reads them and what K is copied from."""
        return self.projected_bytes + self.key_bytes

    @property
    def total_bytes(self) -> int:
        return self.gather_bytes + self.up_projection_bytes


def workspace_of(
    rows: int, dims: MLADims, *, itemsize: int = 2, parallel: ContextParallel | None = None
) -> Workspace:
    """Bytes of a workspace of so many rows, in elements of `itemsize` bytes."""
    local = rows // parallel.world_size if parallel and parallel.world_size > 1 else 0
    per_row = dims.N * itemsize
    return Workspace(
        rows=rows,
        gather_bytes=(rows + local) * dims.E * itemsize,
        projected_bytes=rows * per_row * (dims.P + dims.V),
        key_bytes=rows * per_row * (dims.P + dims.R),
    )


def size_workspace(
    dims: MLADims,
    *,
    max_model_len: int,
    max_num_seqs: int,
    block_size: int,
    memory_budget: int | None = None,
    most_rows: int = MOST_ROWS,
    itemsize: int = 2,
    parallel: ContextParallel | None = None,
) -> Workspace:
    """Rows for a model and its batches: eight of the longest contexts, or four blocks a sequence if
    that is more, but `most_rows` at most, rounded up to whole blocks (with context parallelism, of
    all ranks); and no more whole blocks than `memory_budget` bytes hold.

    Raises:
        TypeError, ValueError: a number is no positive integer, or the budget does not hold one
            block.
    """
    positive(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    positive(block_size=block_size, most_rows=most_rows)
    unit = math.lcm(block_size, parallel.alignment) if parallel else block_size
    wanted = min(max(8 * max_model_len, 4 * max_num_seqs * block_size), most_rows)
    rows = -(-wanted // unit) * unit
    if memory_budget is not None:
        one = workspace_of(unit, dims, itemsize=itemsize, parallel=parallel).total_bytes
        if memory_budget < one:
            raise ValueError(
                f"memory_budget is {memory_budget} bytes, but {unit} rows, the least there can "
                f"be, need {one}"
            )
        rows = min(rows, memory_budget // one * unit)
    return workspace_of(rows, dims, itemsize=itemsize, parallel=parallel)
