"""Requests from a CSV of arrivals, context tokens and generated tokens."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

from experiments.workloads import LENGTHS, Request, TraceError

COLUMNS = {
    "arrival": ("timestamp", "arrival", "arrived_at", "time"),
    "context": ("contexttokens", "context_tokens", "input_length", "prompt_tokens"),
    "generated": ("generatedtokens", "generated_tokens", "output_length", "completion_tokens"),
}
"""Headings by which each column is known, in small letters."""
LATEST = 1e15
"""No arrival is so many seconds or later."""


def read_csv_trace(path: Path) -> list[Request]:
    """Requests of a CSV file with a heading, in order of arrival; nothing is known of prefixes.

    Arrivals are seconds (not ms, as in JSON Lines), or dates and times, which are UTC if they name
    no zone; they count from the first. A request with no generated token counts as one that was
    given one.

    Raises:
        TraceError: the file cannot be read, a column is missing, a line is malformed, or arrivals
            are seconds in some lines and dates in others.
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
    kinds = [is_date for is_date, *_ in rows]
    if any(kinds) and not all(kinds):
        line = kinds.index(not kinds[0]) + 2
        raise TraceError(
            f"{path}, line {line}: {'seconds' if kinds[0] else 'a date'} after lines with "
            f"{'dates' if kinds[0] else 'seconds'}"
        )
    first = min(row[1] for row in rows)
    return [
        Request((arrival - first) * 1000.0, context, max(1, generated), ())
        for _, arrival, context, generated in sorted(rows, key=lambda row: row[1])
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


def _row(path: Path, line: int, row: dict, names: dict[str, str]) -> tuple[bool, float, int, int]:
    """Whether the arrival is a date, the arrival in s, and tokens of context and generated."""
    for heading in names.values():
        if not (row[heading] or "").strip():
            raise TraceError(f"{path}, line {line}: {heading} is missing")
    try:
        is_date, arrival = _seconds(names["arrival"], row[names["arrival"]])
        context = _tokens(names["context"], row[names["context"]], "input_length")
        generated = _tokens(names["generated"], row[names["generated"]], "output_length")
    except ValueError as failure:
        raise TraceError(f"{path}, line {line}: {failure}") from failure
    return is_date, arrival, context, generated


def _tokens(heading: str, text: str, length: str) -> int:
    least, most = LENGTHS[length]
    try:
        tokens = int(text)
    except ValueError:
        tokens = -1
    if not least <= tokens <= most:
        raise ValueError(f"{heading} is {text!r}, expected an integer from {least} to {most}")
    return tokens


def _seconds(heading: str, text: str) -> tuple[bool, float]:
    wrong = ValueError(f"{heading} is {text!r}, expected seconds, or a date and time")
    try:
        seconds = float(text)
    except ValueError:
        try:
            date = datetime.fromisoformat(text.strip())
            return True, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise wrong from None
    if not 0 <= seconds < LATEST:
        raise wrong
    return False, seconds
