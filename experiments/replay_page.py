"""The page that a replay ends with: how large a workspace, which format, how many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.replay_run import (
    Compared,
    Record,
    Setup,
    demand,
    percentiles,
    prefix_hits,
)
from experiments.workloads import Request
from sandbox.cache_formats import FORMATS
from sandbox.planner import workspace_of

TOLERATED = 1.1
"""Chunks of the workspace that is recommended, over those of the largest one."""
MOST_RANKS = 64


def answers(requests: Sequence[Request], setup: Setup, record: Record) -> str:
    """Markdown: what was replayed, percentiles, and the three answers with their tables."""
    parts = [_overview(setup, record), _steps(record), _workspace(setup, record)]
    parts += [_formats(requests, setup, record)]
    return "\n\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" + "---:|" * (len(headings) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _overview(setup: Setup, record: Record) -> str:
    totals, clock = record.totals, record.column("clock_s")
    span = float(clock[-1]) if len(clock) else 0.0
    cached = totals.cached_tokens / max(1, totals.prompt_tokens)
    refused = f" {totals.refused} were longer than the whole cache." if totals.refused else ""
    return (
        f"# Replay\n\n{totals.finished:,} requests in {len(clock):,} steps of "
        f"{setup.policy.step_ms:g} ms ({span:,.0f} s of traffic), replayed in "
        f"{record.seconds:.1f} s.{refused} "
        f"{totals.prompt_tokens:,} prompt tokens, {100 * cached:.1f} % of them in the cache "
        f"already; {totals.generated_tokens:,} generated. The cache: {setup.cache_format}, "
        f"{setup.memory_bytes / 1e9:g} GB on each of {setup.ranks} GPU(s), {setup.layers} layers, "
        f"{record.num_blocks:,} blocks of {setup.block_size} tokens a rank; "
        f"{record.evicted:,} shared groups were evicted."
    )


def _steps(record: Record) -> str:
    context = record.column("context_rows")
    prefill = record.column("prefill_tokens")
    held = record.column("held")
    rows = {
        "generating requests a step": record.column("decodes"),
        "prompt tokens, steps with any": prefill[prefill > 0],
        "context rows, steps with any": context[context > 0],
        "chunks, steps with context": record.column("chunks")[context > 0],
        "blocks held, % of the cache": 100 * held / record.num_blocks,
        "requests waiting": record.column("waiting"),
        "planning, us, decode steps": record.column("plan_us")[prefill == 0],
        "planning, us, steps with prompts": record.column("plan_us")[prefill > 0],
        "first token, ms after arrival": np.array(record.totals.first_token_ms),
    }
    cells = ((name, *(f"{x:,.0f}" for x in percentiles(values))) for name, values in rows.items())
    return "## Steps\n\n" + table(("", "median", "90 %", "99 %", "most"), cells)


def _workspace(setup: Setup, record: Record) -> str:
    best = _by_workspace(record.compared)
    headings = ("rows", "strategy", "chunks", "least", "99 %", "most", "merges", "slivers", "GB")
    rows = []
    for each in sorted(record.compared, key=lambda c: (c.workspace, c.strategy)):
        _, _, p99, most = percentiles(each.chunks)
        rows.append(
            (
                f"{each.workspace:,}",
                each.strategy,
                f"{sum(each.chunks):,}",
                f"{each.least:,}",
                f"{p99:.0f}",
                f"{most:.0f}",
                f"{each.merges:,}",
                f"{each.slivers:,}",
                f"{each.peak_bytes / 1e9:.2f}",
            )
        )
    text = "## How large a workspace?\n\n"
    if not best or not best[0].chunks:
        return text + "No prefill had context: any workspace will do."
    chosen = _enough(best)
    space = workspace_of(chosen.workspace, setup.dims)
    return (
        f"{text}**{chosen.workspace:,} rows with `{chosen.strategy}`**: "
        f"{sum(chosen.chunks):,} chunks for {len(chosen.chunks):,} steps with context, "
        f"{chosen.merges:,} merges. Full, it takes {space.gather_bytes / 1e9:.2f} GB for latent "
        f"rows and {space.up_projection_bytes / 1e9:.2f} GB for keys and values. It is the "
        f"smallest of those compared whose chunks are at most {TOLERATED:.0%} of those of the "
        "largest, with the strategy of fewest merges. Chunks are of all steps, beside the least "
        'that any plan could have; "99 %" and "most" are chunks of one step; GB are of the largest '
        "chunk with its keys and values.\n\n" + table(headings, rows)
    )


def _by_workspace(compared: Sequence[Compared]) -> list[Compared]:
    """Per workspace, from the smallest, the strategy with the fewest chunks, then merges."""
    best: dict[int, Compared] = {}
    for each in compared:
        known = best.get(each.workspace)
        if known is None or _work(each) < _work(known):
            best[each.workspace] = each
    return [best[rows] for rows in sorted(best)]


def _work(each: Compared) -> tuple[int, int]:
    return sum(each.chunks), each.merged_tokens


def _enough(best: Sequence[Compared]) -> Compared:
    fewest = sum(best[-1].chunks)
    return next(each for each in best if sum(each.chunks) <= TOLERATED * fewest)


def _formats(requests: Sequence[Request], setup: Setup, record: Record) -> str:
    full = record.column("waiting").any()
    held = int(record.column("held").max(initial=0)) * setup.tokens_a_block
    wanted = demand(requests, setup) if full else held
    rows, needed = [], {}
    for fmt in FORMATS.values():
        if fmt.refuses(setup.dims) or fmt.name == "float32":
            continue
        capacity = setup.capacity(fmt.name)
        counts = range(1, MOST_RANKS + 1)
        ranks = next((n for n in counts if setup.capacity(fmt.name, n) >= wanted), None)
        needed[fmt.name] = ranks or f"more than {MOST_RANKS}"
        rows.append(
            (
                fmt.name,
                f"{fmt.row_bytes(setup.dims) * setup.layers:,}",
                f"{capacity:,}",
                f"{100 * wanted / max(capacity, 1):.0f} %",
                f"{100 * prefix_hits(requests, capacity):.1f} %",
                needed[fmt.name],
            )
        )
    limit = (
        f"Requests waited; without a limit of memory they would hold at most {wanted:,} tokens."
        if full
        else "None had to wait."
    )
    headings = ("format", "bytes a token", "tokens held", "demand", "prefix hits", "GPUs")
    return (
        "## Which format, how many GPUs?\n\n"
        f"Requests in progress held at most {held:,} tokens at once. {limit} In "
        f"{setup.cache_format} that wants **{needed.get(setup.cache_format)} GPU(s)** of "
        f"{setup.memory_bytes / 1e9:g} GB for the cache. What is beyond the demand keeps prefixes: "
        '"prefix hits" is the share of prompt tokens that a cache of the size would have, used '
        "last kept longest, if all of it were for prefixes and requests came one by one. What a "
        "format costs in accuracy: `python -m experiments cache_error`.\n\n" + table(headings, rows)
    )


def plot(record: Record, path: Path, points: int = 1500) -> None:
    """Batch composition, context and chunks, and cache blocks over time; means of equal spans."""
    from matplotlib.figure import Figure

    clock = record.column("clock_s")
    if not len(clock):
        return
    bounds = np.linspace(0, len(clock), min(points, len(clock)) + 1).astype(int)[:-1]
    spans = np.diff([*bounds, len(clock)])
    at = clock[bounds]

    def mean(name: str) -> np.ndarray:
        return np.add.reduceat(record.column(name), bounds) / spans

    figure = Figure(figsize=(12, 10), layout="constrained")
    composition, workspace, chunks, blocks = figure.subplots(4, 1, sharex=True)
    composition.stackplot(
        at, mean("decodes"), mean("prefill_tokens"), labels=("generating", "prompt tokens")
    )
    composition.set_ylabel("tokens a step")
    workspace.plot(at, mean("context_rows"), linewidth=0.8, label="context rows a step")
    workspace.set_ylabel("rows gathered")
    chunks.plot(at, mean("chunks"), linewidth=0.8, label="chunks a step")
    chunks.plot(at, mean("waiting"), linewidth=0.8, label="requests waiting")
    chunks.set_ylabel("number")
    blocks.stackplot(at, mean("held"), mean("cached"), labels=("held", "kept for their prefix"))
    blocks.axhline(record.num_blocks, color="k", linestyle="--", linewidth=1)
    blocks.set_ylabel("blocks of the cache")
    blocks.set_xlabel("s of traffic")
    for axes in (composition, workspace, chunks, blocks):
        axes.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=100)
