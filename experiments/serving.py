"""A continuous-batching server in its simplest form: which tokens each step computes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from experiments.block_pool import BlockPool, Holding
from experiments.workloads import Request


@dataclass(frozen=True)
class Policy:
    """How a server forms its steps.

    A step computes one token of each request that is generating, then, first come first served,
    prompt tokens up to `token_budget` in all: long prompts go in parts. At most `max_requests` are
    in progress. A step takes `step_ms`.
    """

    token_budget: int = 8192
    max_requests: int = 256
    step_ms: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.max_requests < self.token_budget:
            raise ValueError(
                f"max_requests (--max-requests) is {self.max_requests}, expected 1 to below "
                f"token_budget (--budget) {self.token_budget}"
            )
        if not 0 < self.step_ms < math.inf:
            raise ValueError(f"step_ms (--step-ms) is {self.step_ms}, expected a positive number")


@dataclass(frozen=True)
class Step:
    """One batch, as views that hold until the next step.

    Attributes:
        clock_ms: when it begins.
        query_lens, context_lens: int64 `[B]`, new and cached tokens of each request.
        is_prefill: bool `[B]`.
        block_table: int32 `[B, columns]`.
        waiting: requests that have arrived and are not in progress.
    """

    clock_ms: float
    query_lens: np.ndarray
    context_lens: np.ndarray
    is_prefill: np.ndarray
    block_table: np.ndarray
    waiting: int


@dataclass
class Totals:
    """What became of the requests, in the order of their arrival.

    Attributes:
        first_token_ms: from arrival to the end of the step that gave the first token.
        waited_ms: from arrival until the request was admitted.
        refused: requests that the cache could never hold.
        steps_short_of_memory, steps_short_of_rows: steps at whose start requests waited because
            the cache had no room for the first of them, or `max_requests` were in progress.
        steps_short_of_budget: steps that left prompt tokens of requests in progress for later.
        queued_at_last_arrival: requests that waited, or were in progress without a token computed,
            in the first step after the last one had arrived.
        prompt_tokens, cached_tokens, generated_tokens: in all.
    """

    first_token_ms: list[float] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)
    refused: int = 0
    steps_short_of_memory: int = 0
    steps_short_of_rows: int = 0
    steps_short_of_budget: int = 0
    queued_at_last_arrival: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Server:
    """Requests in progress, a row each of one block table, and those that wait.

    Rows are in the order of admission, without gaps: those below one that ends move up.
    """

    def __init__(self, requests: Sequence[Request], pool: BlockPool, policy: Policy) -> None:
        self.pool, self.policy = pool, policy
        self.totals = Totals()
        self._arriving = deque(sorted(requests, key=lambda request: request.timestamp))
        self._waiting: deque[Request] = deque()
        longest = max((r.input_length + max(r.output_length, 1) for r in requests), default=1)
        columns = min(pool.blocks_for(longest), pool.num_blocks)  # others are refused
        rows = min(policy.max_requests, len(requests))
        self._table = np.zeros((rows, columns), np.int32)
        self._context, self._prompt_left, self._output_left, self._query = (
            np.zeros(rows, np.int64) for _ in range(4)
        )
        self._prefills = np.zeros(rows, bool)
        self._running: list[tuple[Request, Holding]] = []

    def steps(self) -> Iterator[Step]:
        """The steps until all requests have ended; steps with nothing to do are left out."""
        clock = 0.0
        arriving = True
        while self._arriving or self._waiting or self._running:
            if not self._running and not self._waiting:
                clock = max(clock, self._arriving[0].timestamp)
            self._admit(clock)
            count = len(self._running)
            if not count:
                continue
            self._share_budget(count)
            if arriving and not self._arriving:
                arriving = False
                idle = count - int(np.count_nonzero(self._query[:count]))
                self.totals.queued_at_last_arrival = len(self._waiting) + idle
            yield Step(
                clock,
                self._query[:count],
                self._context[:count],
                self._prefills[:count],
                self._table[:count],
                len(self._waiting),
            )
            clock += self.policy.step_ms
            self._finish_step(count, clock)

    def _admit(self, clock: float) -> None:
        while self._arriving and self._arriving[0].timestamp <= clock:
            self._waiting.append(self._arriving.popleft())
        full = self._admit_waiting(clock)
        if self._waiting:
            self.totals.steps_short_of_memory += full
            self.totals.steps_short_of_rows += not full

    def _admit_waiting(self, clock: float) -> bool:
        """Whether the cache had no room for the first of those that go on waiting."""
        while self._waiting and len(self._running) < self.policy.max_requests:
            request = self._waiting[0]
            tokens = request.input_length + max(request.output_length, 1)
            if self.pool.blocks_for(tokens) > self.pool.num_blocks:
                self._waiting.popleft()
                self.totals.refused += 1
                continue
            holding = self.pool.take(request.hash_ids, request.input_length, tokens)
            if holding is None:
                return True
            self._waiting.popleft()
            self._start(request, holding, clock)
        return False

    def _start(self, request: Request, holding: Holding, clock: float) -> None:
        row = len(self._running)
        self._running.append((request, holding))
        self._table[row, : len(holding.blocks)] = holding.blocks
        self._context[row] = holding.cached_tokens
        self._prompt_left[row] = request.input_length - holding.cached_tokens
        self._output_left[row] = max(request.output_length, 1)
        self.totals.waited_ms.append(clock - request.timestamp)
        self.totals.prompt_tokens += request.input_length
        self.totals.cached_tokens += holding.cached_tokens

    def _share_budget(self, count: int) -> None:
        left = self._prompt_left[:count]
        np.greater(left, 0, out=self._prefills[:count])
        prefills = self._prefills[:count]
        room = self.policy.token_budget - (count - int(np.count_nonzero(prefills)))
        np.cumsum(left, out=self._query[:count])
        self.totals.steps_short_of_budget += int(self._query[count - 1]) > room
        before = self._query[:count] - left
        np.minimum(left, np.maximum(room - before, 0), out=self._query[:count])
        self._query[:count][~prefills] = 1

    def _finish_step(self, count: int, clock: float) -> None:
        query, prefills = self._query[:count], self._prefills[:count]
        self._context[:count] += query
        self._prompt_left[:count][prefills] -= query[prefills]
        gave = self._prompt_left[:count] == 0
        self._output_left[:count][gave] -= 1
        self.totals.generated_tokens += int(np.count_nonzero(gave))
        for row in np.flatnonzero(prefills & gave).tolist():
            self.pool.computed(self._running[row][1])
            self.totals.first_token_ms.append(clock - self._running[row][0].timestamp)
        for row in np.flatnonzero(gave & (self._output_left[:count] == 0))[::-1].tolist():
            self._end(row)

    def _end(self, row: int) -> None:
        self.pool.give_back(self._running[row][1])
        self.totals.finished += 1
        count = len(self._running)
        for array in (self._table, self._context, self._prompt_left, self._output_left):
            array[row : count - 1] = array[row + 1 : count]
        del self._running[row]
