"""A request trace through a continuous-batching loop and the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import replay_page
from experiments.cli import console, run_as_script, stop
from experiments.csv_trace import read_csv_trace
from experiments.fingerprint import command_line, fingerprint
from experiments.replay_run import LAYERS, Record, Setup, replay
from experiments.results import jsonable, run_folder
from experiments.serving import Policy, Step, Totals
from experiments.workloads import Generator, Request, TraceError, read_trace
from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS
from sandbox.planner import STRATEGIES

MOST = {
    "--gpus": 1024,
    "--block-size": 1 << 16,
    "--memory": 1_000_000,
    "--layers": 1024,
    "--workspaces": 1 << 24,
}
UNIT = {"--gpus": "", "--block-size": " tokens", "--memory": " GB", "--layers": ""}


def replay_trace(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines with hash_ids (times in ms), or CSV (times in s, or dates); without "
            "it requests are generated"
        ),
    ] = None,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(LAYERS)}")] = "deepseek_v3",
    cache_format: Annotated[str, typer.Option("--format", help="of the cache")] = "bfloat16",
    gpus: Annotated[int, typer.Option(help="ranks over which every context is spread")] = 1,
    budget: Annotated[int, typer.Option(help="tokens that a step computes at most")] = 8192,
    max_requests: Annotated[int, typer.Option(help="requests in progress at most")] = 256,
    step_ms: Annotated[float, typer.Option(help="how long a step takes in the replay")] = 50.0,
    memory: Annotated[float, typer.Option(help="GB for the cache on each GPU")] = 40.0,
    layers: Annotated[
        int | None, typer.Option(help="layers with a cache; None: the model's")
    ] = None,
    block_size: Annotated[int, typer.Option(help="tokens of one rank in a cache block")] = 64,
    workspaces: Annotated[
        str, typer.Option(help="rows to compare; the first is planned with")
    ] = "65536,16384,32768,131072",
    strategies: Annotated[
        str, typer.Option(help=f"of {', '.join(STRATEGIES)}; the first is planned with")
    ] = ",".join(STRATEGIES),
    limit: Annotated[int | None, typer.Option(help="requests to replay; None: all")] = None,
    seed: Annotated[int, typer.Option(help="of generated requests")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for results")] = None,
) -> None:
    """Which batches a server forms under this traffic, and what planning them takes.

    Requests go through a continuous-batching loop with a paged cache that shares prefixes, and each
    step through the planner. A step takes `--step-ms` whatever is in it: the replay shows batches,
    chunks and memory, not speed. It ends with a page on how large a workspace, which cache format
    and how many GPUs this traffic wants; tables, plots and a JSON Lines time line are in
    `results/<run>/`.
    """
    try:
        if limit is not None and limit < 1:
            raise ValueError(f"--limit: {limit}, expected at least 1")
        requests = _requests(trace, seed)[:limit]
        setup = _setup(
            model,
            layers,
            cache_format,
            gpus,
            memory,
            block_size,
            Policy(budget, max_requests, step_ms),
            workspaces,
            strategies,
        )
        folder = _folder(out)
        record = _run(requests, setup)
    except (TraceError, ValueError) as failure:
        raise stop(str(failure)) from failure
    page = replay_page.answers(requests, setup, record)
    _write(folder, page, setup, record)
    console.print(Markdown(page))
    console.print(f"everything is in {folder}/", style="bold", soft_wrap=True, highlight=False)


def _folder(out: Path | None) -> Path:
    """The folder for results, made before the replay: it would be in vain without."""
    folder = run_folder("replay", out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as failure:
        raise ValueError(f"--out: {folder}: {failure.strerror}") from failure
    return folder


def _requests(trace: Path | None, seed: int) -> list[Request]:
    if trace is None:
        return Generator()(seed)
    return read_csv_trace(trace) if trace.suffix.lower() == ".csv" else read_trace(trace)


def _setup(
    model: str,
    layers: int | None,
    cache_format: str,
    gpus: int,
    memory: float,
    block_size: int,
    policy: Policy,
    workspaces: str,
    strategies: str,
) -> Setup:
    for value, name, known in ((model, "--model", LAYERS), (cache_format, "--format", FORMATS)):
        if value not in known:
            raise ValueError(f"{name} {value!r}: expected {', '.join(known)}")
    names = tuple(part.strip() for part in strategies.split(","))
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"--strategies {name!r}: expected {', '.join(STRATEGIES)}")
    try:
        rows = tuple(dict.fromkeys(int(part) for part in workspaces.split(",")))
    except ValueError:
        raise ValueError(f"--workspaces {workspaces!r}: expected numbers of rows") from None
    numbers = {"--gpus": gpus, "--block-size": block_size, "--memory": memory}
    numbers["--layers"] = 1 if layers is None else layers
    for name, number in numbers.items():
        if not 0 < number <= MOST[name]:
            raise ValueError(
                f"{name}: {number}, expected a positive number up to {MOST[name]:,}{UNIT[name]}"
            )
    least = gpus * block_size
    for number in rows:
        if not least <= number <= MOST["--workspaces"]:
            raise ValueError(
                f"--workspaces: {number} rows, expected {least:,} (a block of --block-size "
                f"{block_size} on each of --gpus {gpus}) to {MOST['--workspaces']:,}"
            )
    FORMATS[cache_format].row_bytes(PRESETS[model])
    return Setup(
        dims=PRESETS[model],
        layers=LAYERS[model] if layers is None else layers,
        cache_format=cache_format,
        ranks=gpus,
        memory_bytes=int(memory * 1e9),
        block_size=block_size,
        policy=policy,
        workspaces=rows,
        strategies=tuple(dict.fromkeys(names)),
    )


def _run(requests: Sequence[Request], setup: Setup) -> Record:
    progress = Progress(
        TextColumn("requests"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    with progress:
        bar = progress.add_task("", total=len(requests))

        def show(totals: Totals, step: Step) -> None:
            done = totals.finished + totals.refused
            if done % 16 == 0:
                text = f"{step.clock_ms / 1e3:.0f} s, {len(step.query_lens)} running"
                progress.update(bar, completed=done, description=text)

        return replay(requests, setup, show)


def _write(folder: Path, page: str, setup: Setup, record: Record) -> None:
    names = list(record.timeline)
    with (folder / "timeline.jsonl").open("w") as file:
        for values in zip(*record.timeline.values()):
            file.write(json.dumps(dict(zip(names, values))) + "\n")
    with (folder / "plans.jsonl").open("w") as file:
        for each in record.compared:
            summed = {**asdict(each), "steps": len(each.chunks), "chunks": sum(each.chunks)}
            file.write(json.dumps(summed) + "\n")
    found = {**fingerprint(command_line()), "setup": jsonable(asdict(setup))}
    (folder / "fingerprint.json").write_text(json.dumps(jsonable(found), indent=2) + "\n")
    (folder / "answers.md").write_text(page)
    replay_page.plot(record, folder / "timeline.png")


if __name__ == "__main__":
    run_as_script(replay_trace)
