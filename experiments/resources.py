"""Registers, spills and shared memory of every raw kernel on every architecture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich import box
from rich.progress import track
from rich.table import Table

from experiments.cli import console, run_as_script, stop
from experiments.plan import BadOption, chosen_ops
from sandbox.dims import PRESETS
from sandbox.kernels import specialisations
from sandbox.kernels.case import Case
from sandbox.kernels.cuda import ARCHITECTURES, Launch, MissingDependency, nvrtc, prebuild
from sandbox.kernels.op import Op


def resources(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]", help="Ops to compile; all without one.")
    ] = None,
    dims: Annotated[str, typer.Option(help="The preset whose dims to compile for.")] = "tiny",
    arch: Annotated[str, typer.Option(help="Architectures, with commas.")] = ",".join(
        ARCHITECTURES
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Compile every raw kernel, without a GPU, and report what it takes.

    One bfloat16 case of the preset an op; registers are a thread's, shared memory a block's. A
    spill (registers kept in slow memory) is shown in bytes a thread, and the exit code is then 1.
    """
    architectures = [name.strip() for name in arch.split(",")]
    try:
        chosen = chosen_ops(ops or ())
        if dims not in PRESETS:
            raise BadOption(f"--dims is {dims!r}, expected one of {', '.join(PRESETS)}")
        for name in architectures:
            if reason := nvrtc.unsupported(name):
                raise BadOption(reason)
    except (BadOption, MissingDependency) as failure:
        raise stop(str(failure)) from None
    kernels = [found for op in chosen for found in _kernels(op, dims)]
    for name in architectures:
        wanted = [launch for _, _, launch in kernels if not launch.kernel.unsupported(name)]
        builds = prebuild(wanted, target=name)
        for _ in track(
            builds,
            f"compiling for {name}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ):
            pass
    rows = [row for kernel in kernels for row in _rows(*kernel, architectures)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        console.print(_table(rows, architectures))
    if any(row["spill_stores"] or row["spill_loads"] for row in rows):
        raise typer.Exit(1)


def _kernels(op: Op, dims: str) -> Iterator[tuple[str, str, Launch]]:
    """Op, variant and launch of every raw kernel on the op's first bfloat16 case of these dims."""
    cases = [*op.cases("conformance"), *op.cases("compare")]
    fitting: list[Case] = [
        case
        for case in cases
        if case.dims_name == dims and case.dtype.name == "bfloat16" and case.size != "large"
    ]
    for variant in op.variants.values():
        for launch in specialisations.launches(op, variant, fitting[:1]):
            yield op.name, variant.name, launch


def _rows(
    op: str, variant: str, launch: Launch, architectures: list[str]
) -> Iterator[dict[str, Any]]:
    for arch in architectures:
        if not launch.kernel.unsupported(arch):
            used = launch.kernel.resources(arch, launch.macros)
            kernel = launch.kernel.source.entry
            dynamic = {"dynamic_shared": launch.shared_bytes}
            yield {
                "op": op, "variant": variant, "kernel": kernel, "arch": arch,
                **asdict(used), **dynamic,
            }  # fmt: skip


def _table(rows: list[dict[str, Any]], architectures: list[str]) -> Table:
    table = Table(title="registers a thread (spilled bytes)", box=box.SIMPLE_HEAD)
    for name in ("op", "variant", "kernel"):
        table.add_column(name, overflow="fold")
    for arch in architectures:
        table.add_column(arch.removeprefix("sm_"), justify="right")
    table.add_column("shared B", justify="right")
    table.add_column("block max", justify="right")
    cells: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["op"], row["variant"], row["kernel"]), {})[row["arch"]] = row
    for key, by_arch in cells.items():
        last = list(by_arch.values())[-1]
        shared = last["static_shared"] + last["dynamic_shared"]
        table.add_row(
            *key,
            *(_cell(by_arch.get(arch)) for arch in architectures),
            str(shared),
            str(last["max_threads"]),
        )
    return table


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    spilled = row["spill_stores"] + row["spill_loads"]
    return f"[red]{row['registers']} ({spilled})[/red]" if spilled else str(row["registers"])


if __name__ == "__main__":
    run_as_script(resources)
