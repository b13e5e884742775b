"""The page that a replay ends with: how large a workspace, which format, how many GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.replay_run import (
    Compared,
    Demand,
    Record,
    Setup,
    demand,
    grouped,
    percentiles,
    prefix_hits,
)
from experiments.workloads import PREFIX_BLOCK, Request
from sandbox.cache_formats import FORMATS
from sandbox.planner import Workspace, workspace_of

TOLERATED = 1.1
"""Chunks of the workspace that is recommended, over those of the largest one."""
QUEUE = 0.01
"""The queue grows if more than this share of the requests is queued when the last has arrived."""


def answers(requests: Sequence[Request], setup: Setup, record: Record) -> str:
    """Markdown: what was replayed, percentiles, and the three answers with their tables."""
    parts = [_overview(requests, setup, record), _steps(record), _workspace(setup, record)]
    parts += [_formats(requests, setup, record)]
    return "\n\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" + "---:|" * (len(headings) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _overview(requests: Sequence[Request], setup: Setup, record: Record) -> str:
    totals, clock = record.totals, record.column("clock_s")
    span = float(clock[-1]) if len(clock) else 0.0
    cached = totals.cached_tokens / max(1, totals.prompt_tokens)
    refused = (
        f" Refused, as longer than the whole cache: {totals.refused:,}." if totals.refused else ""
    )
    prefixes = (
        f"{100 * cached:.1f} % of them in the cache already (prefixes are shared by whole groups "
        f"of {setup.group:,} tokens, the least common multiple of {PREFIX_BLOCK} and the "
        f"{setup.tokens_a_block:,} of a block on all GPUs)"
        if _has_prefixes(requests)
        else "of whose prefixes the trace says nothing, so that none is shared"
    )
    return (
        f"# Replay\n\n{totals.finished:,} requests in {len(clock):,} steps of "
        f"{setup.policy.step_ms:g} ms ({span:,.0f} s of traffic), replayed in "
        f"{record.seconds:.1f} s.{refused} "
        f"{totals.prompt_tokens:,} prompt tokens, {prefixes}; "
        f"{totals.generated_tokens:,} generated. The cache: {setup.cache_format}, "
        f"{setup.memory_bytes / 1e9:g} GB on each of {setup.ranks} GPU(s), {setup.layers} layers, "
        f"{record.num_blocks:,} blocks of {setup.block_size} tokens a rank; "
        f"{record.evicted:,} shared groups were evicted."
    )


def _has_prefixes(requests: Sequence[Request]) -> bool:
    return any(request.hash_ids for request in requests)


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
        "admitted, ms after arrival": np.array(record.totals.waited_ms),
        "first token, ms after arrival": np.array(record.totals.first_token_ms),
    }
    cells = ((name, *(f"{x:,.0f}" for x in percentiles(values))) for name, values in rows.items())
    return "## Steps\n\n" + table(("", "median", "90 %", "99 %", "most"), cells)


def _workspace(setup: Setup, record: Record) -> str:
    best = _by_workspace(record.compared)
    headings = ("rows", "strategy", "chunks", "least", "99 %", "most", "merges", "slivers", "GB")
    headings += ("of cache",)
    rows = []
    for each in sorted(record.compared, key=lambda c: (c.workspace, c.strategy)):
        _, _, p99, most = percentiles(each.chunks)
        full = _full(each.workspace, setup).total_bytes
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
                f"{100 * full / setup.memory_bytes:.1f} %",
            )
        )
    text = "## How large a workspace?\n\n"
    if not best or not best[0].chunks:
        return text + "No prefill had context: any workspace will do."
    chosen = _enough(best)
    space = _full(chosen.workspace, setup)
    share = 100 * space.total_bytes / setup.memory_bytes
    return (
        f"{text}**{chosen.workspace:,} rows with `{chosen.strategy}`**: "
        f"{sum(chosen.chunks):,} chunks for {len(chosen.chunks):,} steps with context, "
        f"{chosen.merges:,} merges. Full, it takes {space.gather_bytes / 1e9:.2f} GB for latent "
        f"rows and {space.up_projection_bytes / 1e9:.2f} GB for keys and values on "
        f"each GPU, beside the cache: {share:.1f} % of its {setup.memory_bytes / 1e9:g} GB. Of "
        "each size the strategy with the fewest chunks is taken, among equals that with the fewest "
        "new tokens in merges; of the sizes the smallest whose chunks are at most "
        f"{TOLERATED:.0%} of those of the largest. Chunks are of all steps, beside the least "
        'that any plan could have; "99 %" and "most" are chunks of one step; "GB" are of the '
        'largest chunk with its keys and values, "of cache" is a full '
        "workspace as a share of the memory for the cache.\n\n" + table(headings, rows)
    )


def _full(rows: int, setup: Setup) -> Workspace:
    """What a workspace of so many rows takes on each GPU."""
    return workspace_of(rows, setup.dims, parallel=setup.parallel if setup.ranks > 1 else None)


def _by_workspace(compared: Sequence[Compared]) -> list[Compared]:
    """Per workspace, from the smallest, the strategy of fewest chunks, then merged tokens."""
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
    held = int(record.column("held").max(initial=0)) * setup.tokens_a_block
    totals = record.totals
    limited = bool(record.column("waiting").any() or totals.refused)
    limited |= totals.queued_at_last_arrival > QUEUE * len(requests)
    endless = demand(requests, setup) if limited else None
    wanted = max(held, endless.tokens) if endless else held
    keyed = grouped(requests, setup.group) if _has_prefixes(requests) else None
    rows, needed = [], {}
    for fmt in FORMATS.values():
        if fmt.refuses(setup.dims) or fmt.name == "float32" != setup.cache_format:
            continue
        capacity, of_one = setup.capacity(fmt.name), setup.capacity(fmt.name, 1)
        needed[fmt.name] = f"{max(1, -(-wanted // of_one)):,}" if of_one else "no number of"
        hits = f"{100 * prefix_hits(keyed, capacity, setup.group):.1f} %" if keyed else "-"
        rows.append(
            (
                fmt.name,
                f"{fmt.row_bytes(setup.dims) * setup.layers:,}",
                f"{capacity:,}",
                f"{100 * wanted / capacity:.0f} %" if capacity else "-",
                hits,
                needed[fmt.name],
            )
        )
    headings = ("format", "bytes a token", "tokens held", "demand", "prefix hits", "GPUs")
    prefixes = (
        'What is beyond the demand keeps prefixes: "prefix hits" is the share of prompt tokens '
        "that a cache of the size would have, used last kept longest, if all of it were for "
        "prefixes and requests came one by one."
        if keyed
        else "Nothing is known of prefixes: the trace has no hash ids."
    )
    return (
        "## Which format, how many GPUs?\n\n"
        f"Requests in progress held at most {held:,} tokens at once. "
        f"{_limits(setup, record, endless, wanted)} In {setup.cache_format} that wants "
        f"**{needed[setup.cache_format]} GPU(s)** of {setup.memory_bytes / 1e9:g} GB for the "
        f"cache. {prefixes} What a format costs in accuracy: "
        "`python -m experiments cache_error`.\n\n" + table(headings, rows)
    )


def _limits(setup: Setup, record: Record, endless: Demand | None, wanted: int) -> str:
    """What requests waited for, what they would hold without limit of memory, and what would still
    hold them up then."""
    if endless is None:
        return "None had to wait and none was refused."
    totals, policy = record.totals, setup.policy
    said = []
    if totals.refused:
        said.append(f"Requests refused, as longer than the whole cache: {totals.refused:,}.")
    for count, lacked in (
        (totals.steps_short_of_memory, "room in the cache"),
        (totals.steps_short_of_rows, f"one of the {policy.max_requests:,} (`--max-requests`)"),
    ):
        if count:
            said.append(f"In {count:,} steps requests waited for {lacked}.")
    said.append(
        "Without a limit of memory, for prefixes neither, and with the refused ones among them, "
        f"they would hold at most {wanted:,} tokens."
    )
    queued, still = totals.queued_at_last_arrival, endless.totals.queued_at_last_arrival
    said.append(
        f"When the last one had arrived, {queued:,} were queued; without a limit of memory "
        f"{still:,} would be."
    )
    if still > QUEUE * len(endless.totals.waited_ms):
        by_budget = endless.totals.steps_short_of_budget
        limit = (
            f"compute is the limit (`--budget` {policy.token_budget:,} tokens in `--step-ms` "
            f"{policy.step_ms:g} ms; {by_budget:,} steps left prompt tokens for later)"
            if 2 * by_budget >= endless.totals.steps_short_of_rows
            else f"`--max-requests` {policy.max_requests:,} is the limit"
        )
        said.append(
            f"More memory does not end that queue: {limit}. The number of GPUs below is what "
            "memory takes, not what keeps up with this traffic."
        )
    return " ".join(said)


def plot(record: Record, path: Path, points: int = 1500) -> None:
    """Batches, context, chunks, the queue and cache blocks over time; means of equal numbers of
    steps, of context and chunks over the steps with context."""
    from matplotlib.figure import Figure

    clock = record.column("clock_s")
    if not len(clock):
        return
    bounds = np.linspace(0, len(clock), min(points, len(clock)) + 1).astype(int)[:-1]
    at = clock[bounds]
    with_context = record.column("context_rows") > 0

    def mean(name: str, chosen: np.ndarray | None = None) -> np.ndarray:
        chosen = np.ones(len(clock), bool) if chosen is None else chosen
        total = np.add.reduceat(np.where(chosen, record.column(name), 0), bounds)
        steps = np.add.reduceat(chosen.astype(int), bounds)
        return np.divide(total, steps, out=np.full(len(bounds), np.nan), where=steps > 0)

    panels = {
        "generating requests": mean("decodes"),
        "prompt tokens a step": mean("prefill_tokens"),
        "context rows,\nsteps with context": mean("context_rows", with_context),
        "chunks,\nsteps with context": mean("chunks", with_context),
        "requests waiting": mean("waiting"),
    }
    figure = Figure(figsize=(12, 14), layout="constrained")
    *lines, blocks = figure.subplots(len(panels) + 1, 1, sharex=True)
    for axes, (name, values) in zip(lines, panels.items()):
        axes.plot(at, values, linewidth=0.8, marker=".", markersize=2)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
    blocks.stackplot(at, mean("held"), mean("cached"), labels=("held", "kept for their prefix"))
    blocks.axhline(record.num_blocks, color="k", linestyle="--", linewidth=1)
    blocks.set_ylabel("blocks of the cache")
    blocks.set_xlabel("s of traffic")
    blocks.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=100)
