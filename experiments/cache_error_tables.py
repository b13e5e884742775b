"""Tables of what cache formats err: for the terminal, as text, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from experiments.cache_error import ErrorRow


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[ErrorRow], str]
    right: bool = True


def _short(value: float) -> str:
    """Two significant digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.2g}"


def _median(metric: str, times: float = 1.0) -> Callable[[ErrorRow], str]:
    def cell(row: ErrorRow) -> str:
        median = row.median(metric)
        return "" if median is None else _short(times * median)

    return cell


def _range(metric: str, times: float = 1.0) -> Callable[[ErrorRow], str]:
    def cell(row: ErrorRow) -> str:
        found = row.range(metric)
        return "" if found is None else "-".join(_short(times * end) for end in found)

    return cell


COLUMNS = (
    Column("cache", lambda row: row.name, right=False),
    Column("B a\ntoken", lambda row: str(row.bytes_per_token or "")),
    Column("latent\nrms %", _median("latent_rms", 100)),
    Column("SNR\ndB", _median("latent_snr_db")),
    Column("key\nrms %", _median("key_rms", 100)),
    Column("key\nmax %", _median("key_max", 100)),
    Column("score\nrms", _median("score_rms")),
    Column("KL\nnats", _median("kl")),
    Column("TV\n%", _median("tv", 100)),
    Column("output\n%", _median("output_rms", 100)),
    Column("over\nseeds", _range("output_rms", 100)),
    Column("worst\nhead %", _median("output_rms_worst", 100)),
    Column("1 - cos\nx 1e-4", _median("output_cosine", 1e4)),
)
WIDTH = 120
NOTES = (
    "Medians over the seeds. rms: of the error, over that of the data; SNR: of the latents.",
    "max: the largest error over the largest value. score: rms error of softmax_scale * q.k.",
    "KL, TV (total variation): of the attention over the tokens, mean of the heads.",
    "output: norm of the error over that of the output, median head; 1 - cos: the same.",
)


def ordered(rows: Iterable[ErrorRow]) -> list[ErrorRow]:
    """By bytes a token, then what is as meant first, then by the output's error.

    What was not run comes last.
    """
    return sorted(
        rows,
        key=lambda row: (
            row.bytes_per_token is None,
            row.bytes_per_token or 0,
            not row.as_meant,
            row.median("output_rms") or 0.0,
        ),
    )


def remarks(rows: Iterable[ErrorRow]) -> list[str]:
    """What the ways mean, and why some were not run."""
    said = [f"{row.name}: {row.meaning}" for row in rows if row.meaning]
    return said + [f"{row.name} not run: {row.message}" for row in rows if row.message]


def _table(rows: Sequence[ErrorRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        if row.samples:
            style = "" if row.as_meant else "yellow"
            table.add_row(*(column.cell(row) for column in COLUMNS), style=style)
    return table


def show(rows: Sequence[ErrorRow], heading: Sequence[str], file: IO[str] | None = None) -> None:
    """The table on the terminal or to a file; ways that are not as meant are yellow."""
    to = Console(file=file, width=WIDTH)
    for line in heading:
        to.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    to.print(_table(rows))
    for line in (*remarks(rows), *NOTES):
        to.print(f"  {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


def text(rows: Sequence[ErrorRow], heading: Sequence[str]) -> str:
    file = StringIO()
    show(rows, heading, file)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def markdown(rows: Sequence[ErrorRow], heading: Sequence[str]) -> str:
    lines = [*heading, ""]
    lines.append("| " + " | ".join(c.heading.replace("\n", " ") for c in COLUMNS) + " |")
    lines.append("|" + "|".join("---:" if c.right else "---" for c in COLUMNS) + "|")
    lines += ["| " + " | ".join(c.cell(row) for c in COLUMNS) + " |" for row in rows if row.samples]
    return "\n".join([*lines, "", *(f"- {line}" for line in (*remarks(rows), *NOTES))]) + "\n"
