"""Tables of a run: for the terminal, as text, as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.results import STATUSES, Row

STYLES = {"PASSED": "", "WRONG": "bold red", "ERROR": "bold red", "UNAVAILABLE": "dim"}
HOST_SECONDS = "host s, not a GPU time"
CHECKED = "host: checked build, shuffled schedule; its times compare with no others"


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a row's cell as text."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits without an exponent where that is short; empty for None."""
    if value is None:
        return ""
    if value != value or abs(value) == float("inf"):
        return str(value)
    if value == 0:
        return "0"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if abs(value) < 1e-3 or magnitude > 7:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - magnitude)}f}"


_BEFORE_SHARES = (
    Column("", lambda row: str(row.rank or "")),
    Column("variant", lambda row: row.variant, right=False),
    Column("status", lambda row: row.status, right=False),
    Column("error/\nallowed", lambda row: number(row.error, 2)),
    Column("median\nus", lambda row: number(row.median_us)),
    Column("IQR\nus", lambda row: number(row.iqr_us, 2)),
    Column("GB/s", lambda row: number(row.gb_per_s)),
)
_AFTER_SHARES = (
    Column("x\nbaseline", lambda row: number(row.speedup)),
    Column("eager\nlaunch us", lambda row: number(row.eager_launch_us)),
    Column("L2", lambda row: row.l2 or ""),
    Column("by", lambda row: row.method or ""),
)
GPU_COLUMNS = (
    *_BEFORE_SHARES,
    Column("% of\ncopy", lambda row: number(row.percent_of_copy)),
    Column("time/\ncopy", lambda row: number(row.copy_ratio)),
    *_AFTER_SHARES,
)
COMPUTE_COLUMNS = (
    *_BEFORE_SHARES,
    Column("TFLOP/s", lambda row: number(row.tflop_per_s)),
    Column("% of\nGEMM", lambda row: number(row.percent_of_gemm)),
    Column("% of\nlimit", lambda row: number(row.percent_of_limit)),
    *_AFTER_SHARES,
)
"""Those of an op whose FLOPs can matter; a copy alone is no limit of it."""
CPU_COLUMNS = (
    Column("variant", lambda row: row.variant, right=False),
    Column("target", lambda row: row.target, right=False),
    Column("status", lambda row: row.status, right=False),
    Column("error/allowed", lambda row: number(row.error, 2)),
    Column(HOST_SECONDS, lambda row: number(row.check_host_seconds, 2)),
)


def columns_for(rows: Sequence[Row]) -> tuple[Column, ...]:
    if not any(row.target == "gpu" for row in rows):
        return CPU_COLUMNS
    return COMPUTE_COLUMNS if any(row.computes for row in rows) else GPU_COLUMNS


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows grouped by case, in their order; within a case ranked rows first, by rank."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case, []).append(row)
    return [sorted(g, key=lambda row: row.rank or len(g) + 1) for g in groups.values()]


def title(name: str, rows: Iterable[Row]) -> str:
    """`name`, and what its times are not to be compared with."""
    return f"{name} ({CHECKED})" if any(row.checked for row in rows) else name


def case_parts(rows: Sequence[Row]) -> list[str]:
    """The case in words: its name, size, the limit or the copy's time, and how it was scaled."""
    row = rows[0]
    work = row.workload
    parts = [
        row.case,
        f"{work['requests']} requests, {work['context_tokens']} context + "
        f"{work['query_tokens']} query tokens, {number(row.bytes / 1e6)} MB",
    ]
    timed = next((each for each in rows if each.copy_us), None)
    if timed:
        parts.append(limit(timed))
    if row.scaled:
        parts.append(row.scaled)
    return parts


def case_heading(rows: Sequence[Row]) -> str:
    """The case in words, in one line."""
    return "; ".join(case_parts(rows))


def limit(row: Row) -> str:
    """The least time of a timed row's case, what sets it, and what does not."""
    copy = f"{number(row.copy_us)} us"
    if not (row.computes and row.limit_us):
        return f"copy of as many bytes {copy}"
    small = row.flops < 1e8
    work = f"{number(row.flops / (1e6 if small else 1e9))} {'MFLOP' if small else 'GFLOP'}"
    compute = f"{work} at {number(row.gemm_tflop_per_s)} TFLOP/s"
    if row.limit_by == "compute":
        return f"limit {number(row.limit_us)} us (compute: {compute}; copy {copy})"
    compute_us = number(row.flops / row.gemm_tflop_per_s / 1e6)
    return f"limit {copy} (memory: copy of as many bytes; {compute} {compute_us} us)"


def remarks(rows: Sequence[Row]) -> list[str]:
    """Messages and notes of rows, each once, with the variants that they are about."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for text in filter(None, (row.message, row.note)):
            said.setdefault(text, []).append(row.variant)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in said.items()]


def cpu_table(op: str, rows: Sequence[Row]) -> Table:
    """A line for each variant: how many cases passed on its target, and the largest error."""
    table = Table(title=title(f"{op}: correctness", rows), box=box.SIMPLE_HEAD, title_style="bold")
    headings = ("variant", "target", *STATUSES[:3], "not run", "error / allowed", HOST_SECONDS)
    for heading in headings:
        named = heading in headings[:2]
        table.add_column(heading, justify="left" if named else "right", no_wrap=named)
    for (variant, target), group in _by_variant(rows):
        counts = {status: sum(row.status == status for row in group) for status in STATUSES}
        worst = max((row.error for row in group if row.error is not None), default=None)
        seconds = sum(row.check_host_seconds or 0 for row in group)
        counted = [Text(str(counts[s] or ""), STYLES[s] if counts[s] else "") for s in STATUSES[:3]]
        unavailable = str(counts["UNAVAILABLE"] or "")
        table.add_row(
            variant, target, *counted, unavailable, number(worst, 2), number(seconds or None, 2)
        )
    return table


def _by_variant(rows: Sequence[Row]) -> list[tuple[tuple[str, str], list[Row]]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.variant, row.target), []).append(row)
    return list(groups.items())


def failures(rows: Iterable[Row]) -> list[str]:
    """One line for each variant and message of rows that are WRONG or ERROR, with the command that
    makes the first of them again. Messages that differ in numbers alone count as one."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.failed:
            kind = (row.op, row.variant, row.target, row.status, _NUMBER.sub("#", row.message))
            groups.setdefault(kind, []).append(row)
    return [_failure(group) for group in groups.values()]


_NUMBER = re.compile(r"[-+]?\b(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)\b")


def _failure(alike: Sequence[Row]) -> str:
    row, others = alike[0], len(alike) - 1
    more = f" and {others} more case{'s' * (others > 1)}" if others else ""
    where = f"{row.status} {row.op} {row.variant} on {row.target}, {row.case}{more}"
    return f"{where}: {row.message}\n  {row.reproduce}"


def text_lines(
    op: str, rows: Sequence[Row], width: int = 118, columns: Sequence[Column] | None = None
) -> Iterator[tuple[str, str]]:
    """(style, line) of every row of an op: one heading, then case by case, fastest first."""
    columns = columns or columns_for(rows)
    headings = [column.heading.split("\n") for column in columns]
    cells = {id(row): [column.cell(row) for column in columns] for row in rows}
    widths = [
        max(len(text) for text in [*heading, *(row[i] for row in cells.values())])
        for i, heading in enumerate(headings)
    ]
    gap = "  " if sum(widths) + 2 * len(widths) <= width else " "

    def line(parts: Iterable[str]) -> str:
        padded = (
            part.rjust(size) if column.right else part.ljust(size)
            for part, size, column in zip(parts, widths, columns)
        )
        return (gap + gap.join(padded)).rstrip()

    yield "bold", title(op, rows)
    for level in range(max(map(len, headings))):
        yield "bold", line(h[level] if level < len(h) else "" for h in headings)
    for group in by_case(rows):
        for part in _filled(case_parts(group), width):
            yield "cyan", part
        for row in group:
            yield STYLES[row.status], line(cells[id(row)])
        for remark in remarks(group):
            yield "dim", f"{gap}{remark}"


def _filled(parts: Sequence[str], width: int) -> Iterator[str]:
    """Lines of as many parts as fit; all but the first line are indented."""
    held = parts[0]
    for part in parts[1:]:
        if len(held) + len(part) + 3 > width:
            yield held + ";"
            held = "  " + part
        else:
            held += "; " + part
    yield held


def text_table(op: str, rows: Sequence[Row], columns: Sequence[Column] | None = None) -> str:
    return "\n".join(line for _, line in text_lines(op, rows, columns=columns)) + "\n"


def markdown_table(op: str, rows: Sequence[Row], columns: Sequence[Column] | None = None) -> str:
    """Every row of an op as Markdown tables, one for each case."""
    columns = columns or columns_for(rows)
    lines = [f"## {title(op, rows)}"]
    for group in by_case(rows):
        lines += ["", f"### {case_heading(group)}", ""]
        lines.append("| " + " | ".join(c.heading.replace("\n", " ") or "#" for c in columns) + " |")
        lines.append("|" + "|".join("---:" if c.right else "---" for c in columns) + "|")
        lines += ["| " + " | ".join(c.cell(row) for c in columns) + " |" for row in group]
        lines += ["", *(f"- {remark}" for remark in remarks(group))]
    return "\n".join(lines).rstrip() + "\n"
