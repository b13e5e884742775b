"""Correctness beside time, for every variant on every case."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import report, tables
from experiments.cli import (
    TargetOption,
    VariantFileOption,
    VariantsOption,
    console,
    run_as_script,
    say,
    say_verdict,
    stop,
)
from experiments.fingerprint import command_line, fingerprint
from experiments.plan import (
    BadOption,
    Planner,
    Selection,
    chosen_ops,
    chosen_targets,
    chosen_variants,
    import_variant_files,
)
from experiments.results import Row, Run, run_folder
from experiments.session import Session, group_variants
from experiments.worker_process import TaskFailed, WorkerDied, WorkerProcess
from experiments.workloads import TraceError

FAILURES_SHOWN = 12


def compare(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]", help="Ops to compare; all without one.")
    ] = None,
    variants: VariantsOption = None,
    variant_file: VariantFileOption = None,
    case: Annotated[
        str | None, typer.Option(help="Only cases whose name contains this (or is exactly this).")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines of requests: timestamp, input_length, output_length, "
            "hash_ids. Its batches replace the ops' own cases."
        ),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Batches to take from the trace or the generator: by default 4, and 2 of the "
            "generator's without a GPU.",
        ),
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Divide the batches' lengths by this. By default 1 on a GPU; "
            "elsewhere as much as the CPU needs. Case names and tables state it.",
        ),
    ] = None,
    dims: Annotated[
        str | None,
        typer.Option(
            help="A preset (deepseek_v3, kimi_k2, tiny, ...), letters (N=16,L=256; the "
            "rest is deepseek_v3's), or both (kimi_k2,N=8)."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32, in place of the cases' own.")
    ] = None,
    cache_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Only caches of these formats (fp8_e4m3, fp8_ds_mla, ...; with commas, or all), "
            "and batches in them.",
        ),
    ] = None,
    target: TargetOption = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A fifth of the time a case, no generated batches; "
            "without a GPU only the small cases.",
        ),
    ] = False,
    checked: Annotated[
        bool,
        typer.Option(
            "--checked",
            help="The host runner's checked build, in a shuffled schedule of threads: out of "
            "bounds, misaligned, races. Slow.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the arrays and of the generator.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results; by default results/DATE-TIME-compare."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent variant counts as hung.")
    ] = 300.0,
) -> None:
    """Is it right, and is it faster than what exists?

    Each variant is compared, whole tensor, with the float64 oracle; on a GPU those that are right
    are then timed, all variants of a case in turn, against a copy of the same number of bytes and,
    where they compute, a large bf16 GEMM.
    Without a GPU the same CUDA sources run on the CPU ("host"), Numba kernels in the simulator
    ("sim"), torch on the CPU ("cpu"): correctness only. A variant that crashes is an ERROR in its
    row and spoils no other. The exit code is 1 if any variant is WRONG or ERROR.

    **Examples**

    - `python -m experiments compare`
    - `python -m experiments compare gather --variants 'torch,raw_*'`
    - `python -m experiments compare gather --variant-file my_variant.py`
    - `python -m experiments compare --trace requests.jsonl --batches 6 --dims kimi_k2`
    - `python -m experiments compare gather --format fp8_ds_mla,fp8_e4m3 --dims kimi_k2`
    - `python -m experiments compare lse_merge --dims N=16,L=256 --dtype float16 --quick`
    - `python -m experiments compare gather --variants raw_tile --target host --checked`

    **Results** are in `results/<run>/`: `rows.jsonl` (every column, raw samples, the command that
    makes the row again), `fingerprint.json`, `table.txt`, `table.md`, PNG plots, `report.html`.
    """
    selection = Selection(
        ops=tuple(ops or ()),
        variants=variants,
        variant_files=tuple(path.resolve() for path in variant_file or ()),
        case=case,
        trace=trace,
        batches=batches,
        scale=scale,
        dims=dims,
        dtype=dtype,
        format=cache_format,
        target=target,
        quick=quick,
        checked=checked,
        seed=seed,
    )
    try:
        sessions, left_out = plan_sessions(selection, timeout)
    except (BadOption, TraceError) as failure:
        raise stop(str(failure)) from None
    if not sessions:
        reasons = "; ".join(left_out) or "no case or no variant is left by these options"
        raise stop(f"nothing to run: {reasons}")
    gemm = gemm_ceiling(sessions)
    run = Run(run_folder("compare", out))
    try:
        interrupted = run_sessions(sessions, run)
        write_results(run, gemm)
    finally:
        run.close()
    show(run.rows, run.folder)
    for reason in left_out:
        say(f"left out: {reason}")
    if gemm is not None:
        console.print(f"bf16 GEMM 8192 x 8192 x 8192: {gemm_text(gemm)}", highlight=False)
    if interrupted:
        raise typer.Exit(130)
    if any(row.failed for row in run.rows):
        raise typer.Exit(1)


def plan_sessions(selection: Selection, timeout_s: float) -> tuple[list[Session], list[str]]:
    """A session for each op and group of targets that has something to run; what is left out."""
    import_variant_files(selection.variant_files)
    chosen = chosen_ops(selection.ops)
    names = chosen_variants(chosen, selection.variants)
    targets = chosen_targets(selection.target)
    if selection.checked and "host" not in targets:
        raise BadOption("--checked is for the host runner: it needs --target host")
    planner = Planner(selection, targets)
    sessions = []
    for op in chosen:
        problems = planner.problems(op)
        for gpu, pairs in group_variants(op, names[op.name], targets).items():
            if problems and pairs:
                sessions.append(
                    Session(
                        op=op,
                        gpu=gpu,
                        variants=pairs,
                        problems=problems,
                        reproduce=lambda *row, op=op.name: selection.command(op, *row),
                        variant_files=selection.variant_files,
                        checked=selection.checked,
                        budget_s=0.1 if selection.quick else 0.5,
                        timeout_s=timeout_s,
                    )
                )
    return sessions, planner.left_out


def run_sessions(sessions: Sequence[Session], run: Run) -> bool:
    """Run all sessions, one at a time on a GPU and two elsewhere; whether the user stopped it."""
    lock = threading.Lock()
    progress = Progress(
        TextColumn("{task.fields[op]}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )

    def work(session: Session) -> None:
        bar = progress.add_task("", op=session.title, total=session.steps)

        def advance(done: int, text: str) -> None:
            progress.update(bar, advance=done, description=text[:70])

        session.on_progress = advance
        for rows in session.run():
            with lock:
                run.add(rows)

    parallel = 1 if any(session.gpu for session in sessions) else 2
    with progress, ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(work, session) for session in sessions]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            for session in sessions:
                session.stop()
            return True
    return False


def gemm_ceiling(sessions: Sequence[Session]) -> float | str | None:
    """TFLOP/s of a large bf16 GEMM on this GPU, which the sessions get to compare with, or why it
    was not measured; None where nothing that computes is timed."""
    if not any(session.needs_gemm for session in sessions):
        return None
    worker = WorkerProcess([], {}, 120.0)
    try:
        with console.status("measuring a bf16 GEMM"):
            measured = worker.ask("gemm")
    except (WorkerDied, TaskFailed) as failure:
        return f"not measured: {failure}"
    finally:
        worker.close()
    for session in sessions:
        session.gemm_tflop_per_s = measured
    return measured


def gemm_text(gemm: float | str) -> str:
    return gemm if isinstance(gemm, str) else f"{gemm:.0f} TFLOP/s"


def write_results(run: Run, gemm: float | str | None) -> None:
    """Fingerprint, tables, plots and the report, beside the rows."""
    from experiments import plots  # matplotlib takes a second to import

    found = {**fingerprint(command_line()), "bf16_gemm_tflop_per_s": gemm}
    run.write_json("fingerprint.json", found)
    ops = dict.fromkeys(row.op for row in run.rows)
    rows_of = {op: [row for row in run.rows if row.op == op] for op in ops}
    text = "\n".join(tables.text_table(op, rows) for op, rows in rows_of.items())
    (run.folder / "table.txt").write_text(text)
    markdown = "\n".join(tables.markdown_table(op, rows) for op, rows in rows_of.items())
    (run.folder / "table.md").write_text(markdown)
    report.write(run.folder / "report.html", run.rows, found, plots.plot(run.rows, run.folder))


def show(rows: Sequence[Row], folder: Path) -> None:
    """The run on the terminal."""
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        on_gpu = [row for row in own if row.target == "gpu"]
        if on_gpu:
            for style, line in tables.text_lines(op, on_gpu):
                console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
        elsewhere = [row for row in own if row.target != "gpu"]
        if elsewhere:
            console.print(tables.cpu_table(op, elsewhere))
            not_run = [row for row in elsewhere if row.status == "UNAVAILABLE"]
            for line in tables.remarks(not_run):
                say(f"  not run: {line}", "dim", indent=4)
            if any(row.scaled for row in elsewhere):
                note = "batches are scaled down for the CPU, as their case names say: divN, lengths"
                say(f"  {note} over N; 1inN, one request in N", "dim", indent=4)
    failures = tables.failures(rows)
    for line in failures[:FAILURES_SHOWN]:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if len(failures) > FAILURES_SHOWN:
        console.print(f"and {len(failures) - FAILURES_SHOWN} more failures", style="red")
    say_verdict(rows, folder)


if __name__ == "__main__":
    run_as_script(compare)
