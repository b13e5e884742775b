"""One self-contained HTML page for a run."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from experiments import tables
from experiments.results import Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1150px; color: #222 }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-size: 13px }
td, th { padding: .15rem .6rem; border-bottom: 1px solid #ddd; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr.WRONG, tr.ERROR { background: #fbe3e4 } tr.UNAVAILABLE { color: #999 }
img { max-width: 100% } h3 { font-size: 14px; margin-bottom: 0 } code, pre { font-size: 12px }
"""
_PICTURES = ("times", "stages", "swaps_times", "correctness", "swaps_correctness")


@dataclass(frozen=True)
class Page:
    """What pages of one experiment have in common.

    Attributes:
        how: how it was measured.
        columns: of a case's table.
        sections: headings and lines that follow the cases.
    """

    title: str
    how: str
    columns: Callable[[Sequence[Row]], Sequence[tables.Column]] = tables.columns_for
    sections: Callable[[Sequence[Row]], Sequence[tuple[str, Sequence[str]]]] = lambda rows: ()


COMPARED = Page(
    "MLA kernels compared",
    """
Each variant is first compared, whole tensor, with a float64 oracle, between guard bytes;
error/allowed is the largest distance over the distance allowed. A variant that is not PASSED has
no time, and outputs are poisoned before the timed loop and checked again after it. GPU times are
a launch, from events around replays of a CUDA graph that are queued behind other work; the
replays of all variants of a case take turns. L2 is "cold" where launches rotate over so many
copies of the arrays that more than twice the L2 cache is touched between two uses of one. % of
copy is the time of a device-to-device copy of the same number of bytes, measured in the same
rounds, over the variant's. Ops that compute have a limit instead: the copy's time or that of their
FLOPs at the rate of a bf16 GEMM of 8192 x 8192 x 8192, measured at the start of the run, whichever
is longer, and % of limit is that time over the variant's. % of GEMM is TFLOP/s over the GEMM's, of
products in bf16 whatever the variant's type: float32 has less to reach, codes of 8 bits may have
more. Variants whose quartiles overlap share a rank. Eager launch is the
host time of a call of the op from Python, on the case at hand. Host seconds are the time of a
whole check on the CPU and say nothing about a GPU.
""",
)


def write(
    path: Path,
    rows: Sequence[Row],
    fingerprint: Mapping[str, Any],
    plots: Sequence[Path],
    page: Page = COMPARED,
) -> None:
    """Write the page to `path`, with the pictures in it."""
    title = escape(page.title)
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title>"]
    parts += [f"<style>{_STYLE}</style><h1>{title}</h1>", _summary(rows, fingerprint)]
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        parts.append(f"<h2>{escape(tables.title(op, own))}</h2>")
        for picture in plots:
            if picture.name in [f"{op}_{kind}.png" for kind in _PICTURES]:
                code = base64.b64encode(picture.read_bytes()).decode()
                parts.append(f'<p><img alt="{picture.stem}" src="data:image/png;base64,{code}">')
        for group in tables.by_case(own):
            parts.append(_case(group, page.columns(own)))
    for heading, lines in page.sections(rows):
        listed = "".join(f"<li>{escape(line)}" for line in lines)
        parts.append(f"<h2>{escape(heading)}</h2><ul>{listed}</ul>")
    parts.append(f"<h2>How this was measured</h2><p>{escape(page.how)}</p>")
    parts.append("<h2>Where</h2>" + _fingerprint(fingerprint))
    path.write_text("\n".join(parts) + "\n")


def _summary(rows: Sequence[Row], fingerprint: Mapping[str, Any]) -> str:
    gpu = fingerprint["gpu"]
    where = gpu["name"] if gpu else "no GPU: correctness only"
    counts = ", ".join(
        f"{sum(row.status == status for row in rows)} {status}" for status in tables.STYLES
    )
    commit = (fingerprint["commit"] or "no commit")[:12] + " (changed)" * fingerprint["dirty"]
    failed = "".join(f"<pre>{escape(line)}</pre>" for line in tables.failures(rows))
    return f"<p>{escape(where)}; {fingerprint['date']}; {escape(commit)}; {counts}.</p>{failed}"


def _case(rows: Sequence[Row], columns: Sequence[tables.Column]) -> str:
    def line(tag: str, cells: Sequence[str], status: str = "") -> str:
        marked = (
            f"<{tag}{' class=n' if column.right else ''}>{escape(cell)}</{tag}>"
            for cell, column in zip(cells, columns)
        )
        return f"<tr class={status or 'head'}>{''.join(marked)}</tr>"

    body = [line("th", [column.heading.replace("\n", " ") for column in columns])]
    body += [line("td", [column.cell(row) for column in columns], row.status) for row in rows]
    said = "".join(f"<li>{escape(remark)}" for remark in tables.remarks(rows))
    again = "\n".join(row.reproduce for row in rows)
    return (
        f"<h3>{escape(tables.case_heading(rows))}</h3><table>{''.join(body)}</table>"
        + (f"<ul>{said}</ul>" if said else "")
        + f"<details><summary>Run these rows again</summary><pre>{escape(again)}</pre></details>"
    )


def _fingerprint(fingerprint: Mapping[str, Any]) -> str:
    lines = (
        f"<tr><th>{escape(str(key))}<td>{escape(str(value))}" for key, value in fingerprint.items()
    )
    return f"<table>{''.join(lines)}</table>"
