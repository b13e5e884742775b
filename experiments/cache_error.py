"""What a cache format costs in accuracy: rows, scores, attention, output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import typer
from rich.progress import track

from experiments import cache_error_tables as tables
from experiments.attention_error import Attention, attend, errors
from experiments.cache_ways import Way, ways
from experiments.cli import console, run_as_script, stop
from experiments.fingerprint import command_line, fingerprint
from experiments.plan import BadOption, parse_dims, parse_dtype, parse_formats
from experiments.results import Run, run_folder
from experiments.synthetic_latents import BadData, Latents, captured, synthetic
from sandbox.cache_formats import FORMATS
from sandbox.dims import MLADims


@dataclass(frozen=True)
class Setup:
    """What all rows of a run share. `data` is a file, or "synthetic", made with the last two."""

    dims_name: str
    dims: MLADims
    tokens: int
    heads: int
    seeds: int
    dtype: str
    data: str
    key_outlier: float | None
    magnitude: float | None


@dataclass(frozen=True)
class ErrorRow:
    """One way of storing rows: `METRICS` of each seed, or why it was not run."""

    name: str
    format: str
    as_meant: bool
    meaning: str
    bytes_per_token: int | None
    setup: Setup
    message: str = ""
    samples: dict[str, list[float | None]] = field(default_factory=dict)

    def median(self, metric: str) -> float | None:
        found = self._known(metric)
        return float(np.median(found)) if found else None

    def range(self, metric: str) -> tuple[float, float] | None:
        found = self._known(metric)
        return (min(found), max(found)) if found else None

    def _known(self, metric: str) -> list[float]:
        return [each for each in self.samples.get(metric, ()) if each is not None]


@dataclass(frozen=True)
class Truth:
    """The data of one seed and exact attention over it; `rows` are what the cache gets."""

    data: Latents
    rows: np.ndarray
    exact: Attention


def cache_error(
    formats: Annotated[
        str,
        typer.Option(
            "--format", "--formats", help="Cache formats with commas (bfloat16,fp8_ds_mla), or all."
        ),
    ] = ",".join(name for name in FORMATS if name != "float32"),
    dims: Annotated[
        str, typer.Option(help="A preset, letters (L=256,R=32), or both (kimi_k2,R=32).")
    ] = "deepseek_v3",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens in the context.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Heads, one query each.")] = 16,
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the data: seeds 0, 1, ...")] = 5,
    key_outlier: Annotated[
        float,
        typer.Option(min=1.0, help="How much larger the outlier channels of the keys are."),
    ] = 20.0,
    magnitude: Annotated[
        float,
        typer.Option(min=1e-6, max=1e6, help="Multiplies latents and keys, whose rms is about 1."),
    ] = 1.0,
    dtype: Annotated[
        str,
        typer.Option(
            help="What latents and keys are rounded to before they are stored. Errors are against "
            "the data before that."
        ),
    ] = "float32",
    data: Annotated[
        Path | None,
        typer.Option(
            help="An .npz file with a model's kv_c [T, L] and rotated k_pe [T, R], and perhaps "
            "absorbed queries q [N, L + R], in place of synthetic data."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; by default results/DATE-TIME-cache_error."),
    ] = None,
) -> None:
    """Which cache format errs how much, and where it shows.

    Rows of a context go through each format's exact encode and decode; then one token attends to
    them as in absorbed decode (`q` over the whole row, values are the latents). Errors are against
    float64 attention over the data itself, which no kernel rounds: what is seen is the format.
    The known ways to use a format wrongly are rows of their own.

    Data is **synthetic** without `--data`: latents after an RMSNorm, un-normalised rotated keys
    with outlier channels, heads from flat to peaky with a sink. `--key-outlier` and `--magnitude`
    move it to what your model has.

    **Examples**

    - `python -m experiments cache_error`
    - `python -m experiments cache_error --magnitude 0.01 --format fp8_e4m3,fp8_ds_mla`
    - `python -m experiments cache_error --data layer17.npz --dtype bfloat16`

    **Results** are in `results/<run>/`: `rows.jsonl` (every metric of every seed),
    `fingerprint.json`, `table.txt`, `table.md`, `cache_error.png`.
    """
    try:
        chosen = parse_formats(formats)
        name, found = parse_dims(dims)
        setup = Setup(
            dims_name=name,
            dims=found,
            tokens=tokens,
            heads=heads,
            seeds=seeds,
            dtype=parse_dtype(dtype).name,
            data="synthetic" if data is None else str(data),
            key_outlier=key_outlier if data is None else None,
            magnitude=magnitude if data is None else None,
        )
        first = _truth(setup, 0)
        setup = _as_found(setup, first)
    except (BadOption, BadData) as failure:
        raise stop(str(failure)) from None
    rows = tables.ordered(measure(setup, chosen, first))
    if not any(row.samples for row in rows):
        raise stop("; ".join(f"{row.name}: {row.message}" for row in rows))
    run = Run(run_folder("cache_error", out))
    try:
        run.add(rows)
        write_results(run, rows, _heading(setup, first))
    finally:
        run.close()
    console.print(f"everything is in {run.folder}/", style="bold", highlight=False, soft_wrap=True)


def measure(setup: Setup, formats: Sequence[str], first: Truth) -> list[ErrorRow]:
    """A row for every way of the formats; `first` is the data of seed 0."""
    rows, found = [], []
    for fmt in map(FORMATS.__getitem__, formats):
        row = ErrorRow(fmt.name, fmt.name, True, "", None, setup)
        if reason := fmt.refuses(setup.dims):
            rows.append(replace(row, message=reason))
            continue
        row = replace(row, bytes_per_token=fmt.row_bytes(setup.dims))
        for way in ways(fmt):
            own = {"name": way.name, "as_meant": way.as_meant, "meaning": way.meaning}
            found.append((way, replace(row, **own, samples={})))
    for seed in track(
        range(setup.seeds),
        "storing and attending",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        truth = _truth(setup, seed) if seed else first
        for way, row in found:
            for metric, value in _errors(way, truth, setup).items():
                row.samples.setdefault(metric, []).append(value)
    return rows + [row for _, row in found]


def _errors(way: Way, truth: Truth, setup: Setup) -> dict[str, float | None]:
    read = way.read_back(truth.rows, setup.dims)
    attention = attend(read, truth.data.q, setup.dims.L, setup.dims.softmax_scale)
    return errors(truth.exact, attention)


def _truth(setup: Setup, seed: int) -> Truth:
    dims = setup.dims
    if setup.key_outlier is None:
        data = captured(Path(setup.data), dims, setup.heads, seed)
    else:
        outlier, magnitude = setup.key_outlier, setup.magnitude
        data = synthetic(dims, setup.tokens, setup.heads, seed, outlier, magnitude)
    rows = data.rows.astype(parse_dtype(setup.dtype)).astype(np.float32)
    return Truth(data, rows, attend(data.rows, data.q, dims.L, dims.softmax_scale))


def _as_found(setup: Setup, first: Truth) -> Setup:
    """The setup with the sizes of the data; what is captured whole has nothing to draw."""
    seeds = 1 if first.data.own_queries else setup.seeds
    return replace(setup, tokens=len(first.rows), heads=len(first.data.q), seeds=seeds)


def _heading(setup: Setup, first: Truth) -> list[str]:
    """What was measured, and what the data of seed 0 is like."""
    data, exact = first.data, first.exact
    entropies, sinks = exact.entropies, exact.sinks
    key = f"keys up to {np.abs(data.k_pe).max():.3g}, " if data.k_pe.size else ""
    made = setup.data
    if setup.key_outlier is not None:
        made += f", key outlier {setup.key_outlier:g}, magnitude {setup.magnitude:g}"
    return [
        f"{setup.dims_name}, {setup.tokens} tokens, {setup.heads} heads, {setup.seeds} seeds, "
        f"rows in {setup.dtype}; {made}",
        f"latents up to {np.abs(data.kv_c).max():.3g}, {key}entropy of a head "
        f"{entropies.min():.2g} to {entropies.max():.2g} nats, "
        f"first token takes {sinks.min():.2g} to {sinks.max():.2g}",
    ]


def write_results(run: Run, rows: Sequence[ErrorRow], heading: Sequence[str]) -> None:
    """Fingerprint, tables and plot beside the rows; the table on the terminal."""
    from experiments import cache_error_plots  # matplotlib takes a second to import

    run.write_json("fingerprint.json", fingerprint(command_line()))
    (run.folder / "table.txt").write_text(tables.text(rows, heading))
    (run.folder / "table.md").write_text(tables.markdown(rows, heading))
    cache_error_plots.plot(rows, heading[0], run.folder / "cache_error.png")
    tables.show(rows, heading)


if __name__ == "__main__":
    run_as_script(cache_error)
