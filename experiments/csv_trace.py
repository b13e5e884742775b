"""Requests from a CSV of arrivals, context tokens and generated tokens."""

from __future__ import annotations

import csv
import math
from datetime import datetime
from pathlib import Path

from experiments.workloads import Request, TraceError

COLUMNS = {
    "arrival": ("timestamp", "arrival", "arrived_at", "time"),
    "context": ("contexttokens", "context_tokens", "input_length", "prompt_tokens"),
    "generated": ("generatedtokens", "generated_tokens", "output_length", "completion_tokens"),
}
"""Headings by which each column is known, in small letters."""


def read_csv_trace(path: Path) -> list[Request]:
    """Requests of a CSV file with a heading, in order of arrival; nothing is known of prefixes.

    Arrivals are seconds, or dates and times; they count from the first. A request with no generated
    token counts as one that was given one.

    Raises:
        TraceError: the file cannot be read, a column is missing, or a line is malformed.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = _columns(path, reader.fieldnames or [])
            rows = [_row(path, number, row, names) for number, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as failure:
        raise TraceError(f"{path}: {failure}") from failure
    if not rows:
        raise TraceError(f"{path}: no request in it")
    first = min(arrival for arrival, _, _ in rows)
    return [
        Request((arrival - first) * 1000.0, context, max(1, generated), ())
        for arrival, context, generated in sorted(rows)
    ]


def _columns(path: Path, headings: list[str]) -> dict[str, str]:
    by_name = {heading.strip().lower(): heading for heading in headings}
    found = {}
    for column, names in COLUMNS.items():
        known = [by_name[name] for name in names if name in by_name]
        if not known:
            raise TraceError(f"{path}: no column of {column}; it may be called {', '.join(names)}")
        found[column] = known[0]
    return found


def _row(path: Path, line: int, row: dict, names: dict[str, str]) -> tuple[float, int, int]:
    try:
        context, generated = int(row[names["context"]]), int(row[names["generated"]])
        arrival = _seconds(row[names["arrival"]])
    except (ValueError, TypeError) as failure:
        raise TraceError(f"{path}, line {line}: {failure}") from failure
    if context < 1 or generated < 0 or not math.isfinite(arrival):
        raise TraceError(
            f"{path}, line {line}: arrival {arrival}, {context} context tokens and {generated} "
            "generated ones, expected a time, at least 1 and at least 0"
        )
    return arrival, context, generated


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()
