"""How long planning takes, beside a plain loop over requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from experiments.cli import console, run_as_script, stop
from sandbox.planner import DecodePlanner, plan_step

BLOCK_SIZE, WORKSPACE = 64, 65536


def problem(requests: int, seed: int = 0) -> dict[str, Any]:
    """Prefills of 1 to 64 new tokens over contexts of up to 4,096, one in ten without."""
    rng = np.random.default_rng(seed)
    context = rng.integers(1, 4097, requests) * (rng.random(requests) < 0.9)
    return {
        "query_lens": rng.integers(2, 65, requests),
        "context_lens": context,
        "block_table": rng.integers(0, 1 << 20, (requests, 66)).astype(np.int32),
    }


def vectorised(query_lens: Any, context_lens: Any, block_table: Any) -> dict[str, np.ndarray]:
    """The planner's arrays."""
    plan = plan_step(query_lens, context_lens, block_table, BLOCK_SIZE, WORKSPACE)
    packed = plan.packed()
    return {name: packed[name] for name in packed.places}


def plain_loop(query_lens: Any, context_lens: Any, block_table: Any) -> dict[str, np.ndarray]:
    """The same arrays, a request after the other: what a first version looks like."""
    order = sorted(range(len(query_lens)), key=lambda r: query_lens[r] > 1)
    positions, slots, bounds, lens, contexts, rows_of_table = [], [], [0], [], [], []
    for request in order:
        query, context = int(query_lens[request]), int(context_lens[request])
        for position in range(context, context + query):
            positions.append(position)
            block = int(block_table[request][position // BLOCK_SIZE])
            slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
        bounds.append(bounds[-1] + query)
        lens.append(query + context)
        contexts.append(context)
        rows_of_table.append(block_table[request])
    starts, rows, queries = _chunks_by_loop(
        [(int(query_lens[r]), int(context_lens[r])) for r in order if query_lens[r] > 1]
    )
    return {
        "positions": np.array(positions, np.int64),
        "slot_mapping": np.array(slots, np.int64),
        "query_start_loc": np.array(bounds, np.int32),
        "seq_lens": np.array(lens, np.int32),
        "context_lens": np.array(contexts, np.int32),
        "block_table": np.array(rows_of_table, np.int32),
        "chunk_starts": np.array(starts, np.int32),
        "chunk_cu_seq_lens": np.array(rows, np.int32),
        "chunk_query_start_loc": np.array(queries, np.int32),
    }


def _chunks_by_loop(prefills: list[tuple[int, int]]) -> tuple[list[int], list[int], list[int]]:
    starts: list[int] = []
    rows: list[int] = []
    queries: list[int] = []
    used = 0
    is_open = False

    def add(start: int, length: int, query: int) -> None:
        nonlocal used, is_open
        if not is_open:
            rows.append(0)
            queries.append(0)
            used, is_open = 0, True
        starts.append(start)
        rows.append(rows[-1] + length)
        queries.append(queries[-1] + query)
        used += length

    for query, context in prefills:
        start = 0
        is_open = is_open and context > 0
        while start < context:
            room = WORKSPACE - used if is_open else WORKSPACE
            left = context - start
            if left <= room:
                add(start, left, query)
                break
            cut = min(room, left - 1) // BLOCK_SIZE * BLOCK_SIZE
            if cut:
                add(start, cut, query)
                start += cut
            is_open = False
    return starts, rows, queries


def best_ms(call: Callable[[], Any], seconds: float = 0.5) -> float:
    """The fastest of the calls that fit into the time, two at least."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def planner_speed(
    sizes: Annotated[str, typer.Option(help="numbers of prefills")] = "64,1024,10000,100000",
) -> None:
    """Times of a whole plan (order, positions, slots, chunks, one buffer) on this CPU.

    Beside it the same plan by a plain loop over requests, whose arrays must be equal, and a decode
    step of as many requests planned again in its own memory.
    """
    try:
        counts = [int(part) for part in sizes.split(",")]
    except ValueError:
        raise stop(f"--sizes {sizes!r}: expected numbers") from None
    if min(counts) < 1:
        raise stop(f"--sizes {sizes!r}: expected positive numbers")
    table = Table(title="Planning on the CPU, best of several, ms")
    for heading in ("prefills", "planner", "us a request", "plain loop", "times as fast", "decode"):
        table.add_column(heading, justify="right")
    for count in counts:
        table.add_row(*_measured(count))
    console.print(table)


def _measured(count: int) -> tuple[str, ...]:
    arguments = problem(count)
    fast, slow = vectorised(**arguments), plain_loop(**arguments)
    for name, array in slow.items():
        np.testing.assert_array_equal(fast[name], array, err_msg=name)
    planner_ms = best_ms(lambda: vectorised(**arguments))
    loop_ms = best_ms(lambda: plain_loop(**arguments))
    decodes = DecodePlanner(count, block_size=BLOCK_SIZE)
    step = arguments["context_lens"], arguments["block_table"]
    decode_ms = best_ms(lambda: decodes.plan(*step), 0.1)
    return (
        f"{count:,}",
        f"{planner_ms:.3f}",
        f"{1e3 * planner_ms / count:.2f}",
        f"{loop_ms:.2f}",
        f"{loop_ms / planner_ms:.1f}",
        f"{decode_ms:.3f}",
    )


if __name__ == "__main__":
    run_as_script(planner_speed)
