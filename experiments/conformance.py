"""Writers and readers of cache rows against the conformance vectors of every format."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich import box
from rich.progress import track
from rich.table import Table
from rich.text import Text

from experiments.cli import (
    TargetOption,
    VariantFileOption,
    VariantsOption,
    console,
    run_as_script,
    say,
    stop,
)
from experiments.fingerprint import command_line, fingerprint
from experiments.plan import (
    BadOption,
    chosen_targets,
    chosen_variants,
    import_variant_files,
    parse_formats,
)
from experiments.results import FAILURES, Run, run_folder
from experiments.tables import STYLES
from experiments.vector_checks import CALLS, SIM_VALUES, on_cpu
from experiments.vector_jobs import Finding, Job, run_jobs, variant_jobs
from sandbox import arrays
from sandbox.cache_formats import FORMATS
from sandbox.cache_formats.vectors import VERSION, Vectors
from sandbox.kernels import OPS


def conformance(
    formats: Annotated[
        str, typer.Option("--format", help="Cache formats, with commas, or all.")
    ] = "all",
    tile_scale: Annotated[
        str | None,
        typer.Option(help="Only this rule for the scales of tiles, pow2 or raw; both without."),
    ] = None,
    op: Annotated[
        str | None, typer.Option(help="concat_insert, gather, dequantize_context, with commas.")
    ] = None,
    variants: VariantsOption = None,
    variant_file: VariantFileOption = None,
    target: TargetOption = None,
    writer: Annotated[
        str | None,
        typer.Option(help="A function of yours, FILE.py:function or module:function."),
    ] = None,
    reader: Annotated[str | None, typer.Option(help="As --writer, for a reader.")] = None,
    torch: Annotated[
        bool, typer.Option("--torch", help="Your function takes torch tensors, on the CPU.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; by default results/DATE-TIME-conformance."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent variant counts as hung.")
    ] = 300.0,
) -> None:
    """Does a writer store, and a reader understand, exactly the bytes of a cache format?

    Checks every variant of concat_insert (writer), gather and dequantize_context (readers) that
    runs here, or, with **--writer** and **--reader**, functions of yours:

    - `writer(rows, *, cache_format, L, R, k_scale, tile_scale)` takes `[T, L + R]` (bfloat16,
      float16 or float32) and returns uint8 `[T, row bytes]`
    - `reader(stored, *, cache_format, L, R, k_scale)` takes uint8 `[T, row bytes]` and returns
      numbers `[T, L + R]` of any float dtype

    Arrays are NumPy's (bfloat16 is ml_dtypes'). Raise NotImplementedError for what you do not do.
    The layouts are specified in sandbox/cache_formats/README.md. The exit code is 1 if anything is
    WRONG or an ERROR.

    **Examples**

    - `python -m experiments conformance`
    - `python -m experiments conformance --format fp8_ds_mla --variants 'raw_*'`
    - `python -m experiments conformance --format fp8_ds_mla --tile-scale raw --writer my.py:write`
    - `python -m experiments conformance --reader my_package.cache:read --torch`
    """
    try:
        names = parse_formats(formats)
        if tile_scale not in (None, "pow2", "raw"):
            raise BadOption(f"--tile-scale {tile_scale!r}: expected pow2 or raw")
        if writer or reader:
            jobs = [*user_jobs("writer", writer, torch), *user_jobs("reader", reader, torch)]
        else:
            jobs = jobs_of_variants(op, variants, variant_file or (), target)
        jobs = [part for job in jobs for name in names for part in job.of_format(name, tile_scale)]
    except BadOption as failure:
        raise stop(str(failure)) from None
    if not jobs:
        raise stop("nothing to check: no variant or no vectors are left by these options")
    run = Run(run_folder("conformance", out))
    try:
        done = run_jobs(jobs, variant_file or (), timeout)
        for job in track(done, "checking", total=len(jobs), console=console, transient=True):
            run.add(job.findings)
        run.write_json("fingerprint.json", fingerprint(command_line()))
    finally:
        run.close()
    show(jobs, run.folder)
    if any(finding.failed for finding in run.rows):
        raise typer.Exit(1)
    if not any(finding.status == "PASSED" for finding in run.rows):
        raise stop("nothing was checked: see what was not run")


def jobs_of_variants(
    ops: str | None, pattern: str | None, files: Sequence[Path], target: str | None
) -> list[Job]:
    """Every chosen variant of the ops that write or read rows, on each of its targets."""
    import_variant_files(files)
    wanted = [part.strip() for part in ops.split(",")] if ops else list(CALLS)
    for name in wanted:
        if name not in CALLS:
            raise BadOption(f"--op {name!r}: expected {', '.join(CALLS)}")
    chosen = [OPS[name] for name in wanted]
    names, targets = chosen_variants(chosen, pattern), chosen_targets(target)
    return variant_jobs(chosen, names, targets, files)


def user_jobs(role: str, place: str | None, torch: bool) -> list[Job]:
    """The user's function, as a job of this process."""
    if place is None:
        return []
    function = user_function(role, place)

    def call(vectors: Vectors) -> Any:
        given = vectors.rows if role == "writer" else vectors.stored
        how = {"cache_format": vectors.cache_format, "L": vectors.L, "R": vectors.R}
        how["k_scale"] = vectors.k_scale
        if role == "writer":
            how["tile_scale"] = vectors.tile_scale
        given = arrays.to_torch(given.copy()) if torch else given.copy()
        return on_cpu(arrays.adopt(function(given, **how), f"what {place} returned"))

    return [Job(role, place, call=call, options=("--torch",) * torch)]


def user_function(role: str, place: str) -> Callable[..., Any]:
    """The function that `FILE.py:function` or `module:function` names."""
    where, _, name = place.rpartition(":")
    if not where:
        raise BadOption(f"--{role} {place!r}: expected FILE.py:function or module:function")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"{role}_file", where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, name)
    except Exception as failure:
        raise BadOption(f"--{role} {place}: {failure}") from failure
    if not callable(function):
        raise BadOption(f"--{role} {place}: {name} is {type(function).__name__}, no function")
    return function


def show(jobs: Sequence[Job], folder: Path) -> None:
    """The run on the terminal."""
    for title in dict.fromkeys(job.title for job in jobs):
        console.print(table(title, [job for job in jobs if job.title == title]))
    for line in dict.fromkeys(line for job in jobs for line in remarks(job)):
        say(f"  {line}", "dim", indent=4)
    for line in failures(jobs):
        say(line, "red", indent=2)
    statuses = [finding.status for job in jobs for finding in job.findings]
    failed = sum(status in FAILURES for status in statuses)
    verdict = f"vectors of version {VERSION}: " + f"{failed} sets failed, " * (failed > 0)
    verdict += f"{statuses.count('PASSED')} sets passed; everything is in {folder}/"
    say(verdict, "bold red" if failed else "bold")


def table(title: str, jobs: Sequence[Job]) -> Table:
    """What came of each format, a line for all variants that came out alike."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for job in sorted(jobs, key=lambda job: list(FORMATS).index(job.cache_format)):
        ran = [each for each in job.findings if each.status != "UNAVAILABLE"]
        name = " ".join(filter(None, (job.cache_format, job.tile_scale)))
        sets = part_of(len(ran), len(job.vectors))
        rows = part_of(sum(f.rows for f in ran), sum(len(v.stored) for v in job.vectors))
        groups.setdefault((name, job.target, job.status, sets, rows), []).append(job.variant)
    made = Table(title=title, title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("format", "variants", "target", "status", "sets", "rows"):
        justify = "right" if heading in ("sets", "rows") else "left"
        made.add_column(heading, justify=justify, no_wrap=heading != "variants")
    for (name, target, status, sets, rows), variants in groups.items():
        cells = (name, ", ".join(variants), target, Text(status, STYLES[status]), sets, rows)
        made.add_row(*cells)
    return made


def part_of(some: int, total: int) -> str:
    return f"{some} of {total}" if some < total else str(total)


def remarks(job: Job) -> Iterator[str]:
    """Why something was not checked."""
    if job.target == "sim":
        yield f"sim is slow: it gets at most {SIM_VALUES} values of a set of vectors"
    for reason in {each.message for each in job.findings if each.status == "UNAVAILABLE"}:
        yield f"not run: {job.place}: {reason}"


def failures(jobs: Sequence[Job]) -> Iterator[str]:
    """A failure of each job, of the commonest cause, and how to see it again."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for job in jobs:
        failed = [finding for finding in job.findings if finding.failed]
        if failed:
            causes = [finding.mismatch.get("suspicion", "") for finding in failed]
            first = failed[causes.index(Counter(causes).most_common(1)[0][0])]
            found.setdefault((job.place, first.message), [first]).extend(failed[1:])
    for (place, message), (first, *others) in found.items():
        more = f" and {len(others)} more sets" if others else ""
        yield f"{first.status} {place}, {first.vectors}{more}: {message}"
        yield f"  {first.reproduce}"


if __name__ == "__main__":
    run_as_script(conformance)
