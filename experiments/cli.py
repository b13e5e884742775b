"""What every experiment's command line shares."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

VariantsOption = Annotated[
    str | None, typer.Option(help="Names or patterns with commas: 'torch,raw_*'.")
]
VariantFileOption = Annotated[
    list[Path] | None,
    typer.Option(help="A Python file of yours whose decorators register variants."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        help="gpu, host, sim, cpu, with commas. By default the GPU, or without one all the others."
    ),
]

console = Console()
errors = Console(stderr=True)


def run_as_script(command: Callable[..., Any]) -> None:
    """Run one experiment, as `python -m experiments <name>` would."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command()(command)
    app()


def say(text: str, style: str = "", indent: int = 0) -> None:
    """Print a line; on a terminal wrapped between words, below its first `indent` columns."""
    if console.is_terminal:
        lines = textwrap.wrap(
            text,
            console.width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = "\n".join(lines)
    console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def say_verdict(rows: Sequence[Any], folder: Path) -> None:
    """How many of a run's rows failed and passed, and where the run is."""
    failed = sum(row.failed for row in rows)
    passed = sum(row.status == "PASSED" for row in rows)
    verdict = f"{failed} failed, " * (failed > 0) + f"{passed} passed; everything is in {folder}/"
    say(verdict, "bold red" if failed else "bold")


def stop(message: str) -> typer.Exit:
    """Say what is wrong with the command and end with exit code 2."""
    errors.print(f"Error: {message}", style="red", soft_wrap=True, highlight=False, markup=False)
    return typer.Exit(2)
