"""The ops and their variants, and where each can run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich import box
from rich.table import Table

from experiments.cli import console, run_as_script, say, stop
from experiments.plan import BadOption, chosen_ops
from sandbox.kernels.op import Op


def list_ops(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]", help="Ops to list; all without one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Ops, their variants, and where each can run here, or why it cannot.

    A variant appears here because its file is in the op's folder: nothing else has to be edited.
    """
    try:
        chosen = chosen_ops(ops or ())
    except BadOption as failure:
        raise stop(str(failure)) from None
    if as_json:
        typer.echo(json.dumps({op.name: inventory(op) for op in chosen}, indent=2))
        return
    for op in chosen:
        console.print(_table(op))
        for line in _reasons(op):
            say(f"  {line}", "dim", indent=4)


def inventory(op: Op) -> list[dict[str, object]]:
    """The variants of an op; `where` maps each target to "" or the reason why it cannot run."""
    return [
        {
            "variant": variant.name,
            "kind": variant.kind,
            "baseline": variant.baseline,
            "idea": variant.idea,
            "where": {target: variant.unavailable(target) or "" for target in variant.targets},
        }
        for variant in op.variants.values()
    ]


def _table(op: Op) -> Table:
    table = Table(title=op.name, title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("variant", no_wrap=True)
    table.add_column("kind")
    table.add_column("idea")
    table.add_column("runs here on", no_wrap=True)
    for variant in inventory(op):
        able = [target for target, reason in variant["where"].items() if not reason]
        name = variant["variant"] + " (baseline)" * variant["baseline"]
        table.add_row(name, variant["kind"], variant["idea"], ", ".join(able) or "-")
    return table


def _reasons(op: Op) -> list[str]:
    """Why variants cannot run on a target, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for variant in inventory(op):
        for target, reason in variant["where"].items():
            if reason:
                found.setdefault((target, reason), []).append(variant["variant"])
    return [f"not on {t}: {', '.join(names)}: {reason}" for (t, reason), names in found.items()]


if __name__ == "__main__":
    run_as_script(list_ops)
