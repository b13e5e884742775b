"""A trace through the server and the planner: what every step planned, and how plans compare."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.block_pool import BlockPool
from experiments.serving import Policy, Server, Step, Totals
from experiments.workloads import PREFIX_BLOCK, Request
from sandbox.cache_formats import FORMATS
from sandbox.dims import MLADims
from sandbox.planner import (
    ContextParallel,
    DecodePlanner,
    plan_context_chunks,
    plan_step,
    report,
)

LAYERS = {"deepseek_v3": 61, "deepseek_v2_lite": 27, "kimi_k2": 61, "kimi_linear": 7, "tiny": 2}
"""Layers with a latent cache, by preset."""


@dataclass(frozen=True)
class Setup:
    """A model, its cache, and the plans to compare.

    Attributes:
        ranks: GPUs over which contexts are spread; each holds a part of every context.
        memory_bytes: for the cache, on each of them.
        workspaces: rows that a step may gather, on all ranks together; the first is planned with.
        strategies: of the planner; the first is planned with.
    """

    dims: MLADims
    layers: int
    cache_format: str
    ranks: int
    memory_bytes: int
    block_size: int
    policy: Policy
    workspaces: tuple[int, ...]
    strategies: tuple[str, ...]

    @property
    def parallel(self) -> ContextParallel:
        return ContextParallel(self.ranks, 1, self.block_size)

    @property
    def group(self) -> int:
        """Tokens by which prefixes are shared: whole blocks and whole keys of a trace."""
        return math.lcm(PREFIX_BLOCK, self.tokens_a_block)

    @property
    def tokens_a_block(self) -> int:
        """A column of the block table stands for one block on each rank."""
        return self.block_size * self.ranks

    def blocks(self, cache_format: str) -> int:
        """Blocks of each rank's cache."""
        row = FORMATS[cache_format].row_bytes(self.dims)
        return self.memory_bytes // (row * self.block_size * self.layers)

    def capacity(self, cache_format: str, ranks: int | None = None) -> int:
        """Tokens that the caches of all ranks hold."""
        ranks = self.ranks if ranks is None else ranks
        return self.blocks(cache_format) * self.block_size * ranks


@dataclass
class Compared:
    """What one strategy and workspace made of all steps with context.

    Attributes:
        chunks: of each such step.
        merges, merged_tokens, slivers: in all, as in a `Report` of the planner.
        least: chunks that the steps would need at least.
        peak_bytes: of the largest chunk, with its keys and values.
    """

    strategy: str
    workspace: int
    chunks: list[int] = field(default_factory=list)
    least: int = 0
    merges: int = 0
    merged_tokens: int = 0
    slivers: int = 0
    peak_bytes: int = 0


TIMELINE = ("clock_s", "decodes", "prefill_tokens", "context_rows", "chunks", "held", "cached")
TIMELINE += ("waiting", "plan_us")


@dataclass
class Record:
    """One replay: a value a step for each of `TIMELINE`, the comparisons, what became of requests.

    `held` and `cached` are blocks that requests hold, and that wait for one with their prefix.
    """

    timeline: dict[str, list[float]]
    compared: list[Compared]
    totals: Totals
    num_blocks: int
    evicted: int = 0
    seconds: float = 0.0

    def column(self, name: str) -> np.ndarray:
        return np.array(self.timeline[name])


def grouped(requests: Sequence[Request], group: int) -> list[Request]:
    """The requests with prefix keys for groups of so many tokens, a multiple of 512."""
    step = group // PREFIX_BLOCK
    if step == 1:
        return list(requests)
    return [
        Request(r.timestamp, r.input_length, r.output_length, r.hash_ids[step - 1 :: step])
        for r in requests
    ]


def replay(
    requests: Sequence[Request], setup: Setup, on_step: Callable[[Totals, Step], None]
) -> Record:
    """Serve all requests, planning every step; `on_step` is called after each.

    Raises:
        ValueError: the cache holds no block, or a workspace is too small for one aligned part.
    """
    blocks = setup.blocks(setup.cache_format)
    if not 0 < blocks < 1 << 31:
        raise ValueError(
            f"--memory: {setup.memory_bytes} bytes do not hold one block of all layers"
            if not blocks
            else f"--memory: {setup.memory_bytes} bytes hold more than 2^31 blocks"
        )
    pool = BlockPool(blocks, setup.tokens_a_block, setup.group)
    server = Server(grouped(requests, setup.group), pool, setup.policy)
    compared = [Compared(s, w) for w in setup.workspaces for s in setup.strategies]
    record = Record({name: [] for name in TIMELINE}, compared, server.totals, blocks)
    decodes = DecodePlanner(
        min(setup.policy.max_requests, len(requests)),
        block_size=setup.tokens_a_block,
        num_blocks=blocks,
    )
    start = time.perf_counter()
    for step in server.steps():
        _plan(step, setup, decodes, pool, record)
        on_step(server.totals, step)
    record.seconds = time.perf_counter() - start
    record.evicted = pool.evicted
    return record


def _plan(
    step: Step, setup: Setup, decodes: DecodePlanner, pool: BlockPool, record: Record
) -> None:
    scheduled = np.flatnonzero(step.query_lens)
    query, context = step.query_lens[scheduled], step.context_lens[scheduled]
    prefills = step.is_prefill[scheduled]
    rows = chunks = 0
    begin = time.perf_counter()
    if prefills.any():
        columns = pool.blocks_for(int((context + query).max()))
        plan = plan_step(
            query,
            context,
            step.block_table[scheduled, :columns],
            setup.tokens_a_block,
            setup.workspaces[0] // setup.ranks,
            is_prefill=prefills,
            alignment=setup.parallel.alignment,
            padding=setup.parallel.padding if setup.ranks > 1 else None,
            strategy=setup.strategies[0],
            num_blocks=pool.num_blocks,
        )
        plan.packed()
        rows, chunks = int(plan.context.pieces.length.sum()), len(plan.context)
    else:
        decodes.plan(step.context_lens, step.block_table)
    plan_us = (time.perf_counter() - begin) * 1e6
    if rows:
        _compare(context[prefills], query[prefills], setup, record)
    prefill_tokens = int(query[prefills].sum())
    values = (
        step.clock_ms / 1e3,
        int(np.count_nonzero(~prefills)),
        prefill_tokens,
        rows,
        chunks,
        pool.held_blocks,
        pool.cached_blocks,
        step.waiting,
        plan_us,
    )
    for name, value in zip(TIMELINE, values):
        record.timeline[name].append(value)


def _compare(context: np.ndarray, query: np.ndarray, setup: Setup, record: Record) -> None:
    for each in record.compared:
        plan = plan_context_chunks(
            context,
            query,
            each.workspace // setup.ranks,
            alignment=setup.parallel.alignment,
            padding=setup.parallel.padding if setup.ranks > 1 else None,
            strategy=each.strategy,
        )
        found = report(plan, setup.dims, setup.cache_format)
        each.chunks.append(found.chunks)
        each.least += found.least_chunks
        each.merges += found.merges
        each.merged_tokens += found.merged_tokens
        each.slivers += found.slivers
        each.peak_bytes = max(each.peak_bytes, found.peak_bytes)


@dataclass(frozen=True)
class Demand:
    """What the requests would do with a cache as large as they like.

    Attributes:
        tokens: that requests in progress hold at most, in whole blocks of all ranks.
        totals: what became of the requests; none was refused or waited for memory.
    """

    tokens: int
    totals: Totals


def demand(requests: Sequence[Request], setup: Setup) -> Demand:
    """Serve the requests, refused ones too, with the replay's blocks and groups, without limit of
    memory and without planning."""
    size = setup.tokens_a_block
    blocks = sorted(-(-(r.input_length + max(r.output_length, 1)) // size) for r in requests)
    most = max(1, sum(blocks[-setup.policy.max_requests :]))
    pool = BlockPool(2 * most, size, setup.group)
    server = Server(grouped(requests, setup.group), pool, setup.policy)
    held = max((pool.held_blocks for _ in server.steps()), default=0)
    return Demand(held * size, server.totals)


def prefix_hits(requests: Sequence[Request], tokens: int, group: int = PREFIX_BLOCK) -> float:
    """Share of prompt tokens that a cache of so many tokens would have; requests one by one.

    A key stands for `group` tokens. What was used longest ago goes first, of one prompt the last.
    """
    room = max(0, tokens // group)
    cache: OrderedDict[int, None] = OrderedDict()
    hit = total = 0
    for request in requests:
        leading = 0
        keys = request.hash_ids[: request.input_length // group]
        for key in keys:
            if key not in cache:
                break
            leading += 1
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > room:
            cache.popitem(last=False)
        hit += min(leading * group, request.input_length - 1)
        total += request.input_length
    return hit / total if total else 0.0


def percentiles(values: Sequence[float]) -> Iterator[float]:
    """The 50th, 90th, 99th percentile and the largest; zeros without values."""
    return iter(np.percentile(values, (50, 90, 99, 100)).tolist() if len(values) else [0.0] * 4)
