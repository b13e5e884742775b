"""Registers, spills and shared memory of every raw kernel on every architecture."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.progress import track

from experiments.cli import console, run_as_script, say, stop
from experiments.plan import BadOption, chosen_ops, parse_formats
from sandbox.dims import PRESETS
from sandbox.kernels import specialisations
from sandbox.kernels.cuda import ARCHITECTURES, Launch, MissingDependency, nvrtc, prebuild
from sandbox.kernels.op import Op


def resources(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]", help="Ops to compile; all without one.")
    ] = None,
    dims: Annotated[str, typer.Option(help="The preset whose dims to compile for.")] = "tiny",
    cache_format: Annotated[
        str, typer.Option("--format", help="Cache formats, with commas, or all.")
    ] = "bfloat16",
    arch: Annotated[str, typer.Option(help="Architectures, with commas.")] = ",".join(
        ARCHITECTURES
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Compile every raw kernel, without a GPU, and report what it takes.

    One case of the preset an op and format, of bfloat16 values; registers are a thread's, shared
    memory a block's. A spill (registers kept in slow memory) is shown in bytes a thread, and the
    exit code is then 1.
    """
    architectures = [name.strip() for name in arch.split(",")]
    try:
        chosen = chosen_ops(ops or ())
        formats = parse_formats(cache_format)
        if dims not in PRESETS:
            raise BadOption(f"--dims is {dims!r}, expected one of {', '.join(PRESETS)}")
        for name in architectures:
            if reason := nvrtc.unsupported(name):
                raise BadOption(reason)
    except (BadOption, MissingDependency) as failure:
        raise stop(str(failure)) from None
    kernels = [found for op in chosen for found in _kernels(op, dims, formats, architectures)]
    if not kernels:
        raise stop(f"no kernel has a case of {cache_format} with the dims of {dims}")
    for name in architectures:
        wanted = [each.launch for each in kernels if each.arch == name]
        builds = prebuild(wanted, target=name)
        for _ in track(
            builds,
            f"compiling for {name}",
            console=console,
            transient=True,
            disable=not console.is_terminal,
        ):
            pass
    rows = [_row(kernel) for kernel in kernels]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _show(rows, architectures)
    if any(row["spill_stores"] or row["spill_loads"] for row in rows):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Kernel:
    op: str
    variant: str
    format: str
    arch: str
    launch: Launch


def _kernels(
    op: Op, dims: str, formats: Sequence[str], architectures: Sequence[str]
) -> Iterator[_Kernel]:
    """Every raw kernel on the op's first case of these dims in each format, as each architecture
    that can run it would have it."""
    cases = specialisations.representative(op, dims, formats)
    first = {case.format.name: case for case in reversed(cases)}
    for variant in op.variants.values():
        for name in filter(first.get, formats):
            for arch in architectures:
                for launch in specialisations.launches(op, variant, [first[name]], arch):
                    if not launch.kernel.unsupported(arch):
                        yield _Kernel(op.name, variant.name, name, arch, launch)


def _row(kernel: _Kernel) -> dict[str, Any]:
    launch = kernel.launch
    return {
        "op": kernel.op,
        "variant": kernel.variant,
        "kernel": launch.kernel.source.entry,
        "format": kernel.format,
        "arch": kernel.arch,
        **asdict(launch.kernel.resources(kernel.arch, launch.macros)),
        "dynamic_shared": launch.shared_bytes,
    }


def _show(rows: list[dict[str, Any]], architectures: list[str]) -> None:
    """The names of op, variant and kernel, and below them a line for each cache format: of several
    specialisations the one that takes most."""
    kernels: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        lines = kernels.setdefault(f"{row['op']} {row['variant']}: {row['kernel']}", {})
        by_arch = lines.setdefault(row["format"], {})
        by_arch[row["arch"]] = max(by_arch.get(row["arch"], row), row, key=_use)
    label_width = max(len(row["format"]) for row in rows)
    headings = [*(arch.removeprefix("sm_") for arch in architectures), "shared", "threads"]

    def line(label: str, cells: Sequence[str]) -> str:
        columns = (cell.rjust(max(4, len(heading))) for cell, heading in zip(cells, headings))
        return f"  {label:{label_width}} {' '.join(columns)}"

    say("registers a thread (spilled bytes), and a block's shared bytes and most threads", "bold")
    say(line("", headings), "bold")
    for kernel, lines in kernels.items():
        say(kernel)
        for name, by_arch in lines.items():
            found = by_arch.values()
            shared = _range(row["static_shared"] + row["dynamic_shared"] for row in found)
            threads = _range(row["max_threads"] for row in found)
            cells = [_cell(by_arch.get(arch)) for arch in architectures]
            style = "red" if any("(" in cell for cell in cells) else ""
            say(line(name, [*cells, shared, threads]), style)


def _range(numbers: Iterable[int]) -> str:
    """The number of all architectures, or the least and the most."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _use(row: dict[str, Any]) -> tuple[int, int]:
    return row["spill_stores"] + row["spill_loads"], row["registers"]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    spilled = row["spill_stores"] + row["spill_loads"]
    return f"{row['registers']} ({spilled})" if spilled else str(row["registers"])


if __name__ == "__main__":
    run_as_script(resources)
