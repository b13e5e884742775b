"""Pictures of a run: times and shares of the limit on a GPU, a correctness matrix elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from experiments.results import STATUSES, Row

_STATUS_COLORS = ("#4c9f70", "#d1495b", "#8d0801", "#d9d9d9")
_STATUS_SIGNS = {"PASSED": "", "WRONG": "W", "ERROR": "E", "UNAVAILABLE": ""}


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """PNG files for the ops of a run, in `folder`."""
    made = []
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        timed = [row for row in own if row.median_us is not None]
        if timed:
            made.append(_save(_times(op, timed), folder / f"{op}_times.png"))
        made.append(_save(_matrix(op, own), folder / f"{op}_correctness.png"))
    return made


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return path


def _times(op: str, rows: Sequence[Row]) -> Figure:
    """Median with quartiles, and share of what the hardware can do, per variant and case.

    That is the limit by copy and GEMM for an op that computes, else the copy.
    """
    computes = any(row.computes and row.limit_us for row in rows)
    floor = "limit_us" if computes else "copy_us"
    share = "percent_of_limit" if computes else "percent_of_copy"
    cases = list(dict.fromkeys(row.case for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    height_in = 1.5 + 0.14 * len(cases) * (len(variants) + 1)
    figure = Figure(figsize=(13, height_in), layout="constrained")
    times, shares = figure.subplots(1, 2, sharey=True)
    colors = matplotlib.colormaps["tab20"].colors
    height = 0.85 / len(variants)
    for index, variant in enumerate(variants):
        own = [row for row in rows if row.variant == variant]
        places = [cases.index(row.case) + (index + 0.5) * height - 0.425 for row in own]
        spread = [
            [row.median_us - row.q25_us for row in own],
            [row.q75_us - row.median_us for row in own],
        ]
        look = {"height": height, "color": colors[index % 20], "label": variant}
        times.barh(places, [row.median_us for row in own], xerr=spread, **look)
        shares.barh(places, [getattr(row, share) or 0 for row in own], **look)
    for place, case in enumerate(cases):
        floor_us = next((getattr(row, floor) for row in rows if row.case == case), None)
        if floor_us:
            times.plot([floor_us, floor_us], [place - 0.45, place + 0.45], "k--", linewidth=1)
    times.set_xscale("log")
    dashed = "the limit by copy and GEMM" if computes else "a copy of as many bytes"
    times.set_xlabel(f"median GPU time, us a launch; dashed: {dashed}")
    shares.set_xlabel("% of the limit" if computes else "% of the copy's speed")
    shares.axvline(100, color="k", linestyle="--", linewidth=1)
    times.set_yticks(range(len(cases)), [_wrapped(case) for case in cases], fontsize=7)
    times.set_ylim(len(cases) - 0.5, -0.5)
    shares.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(f"{op}, GPU times")
    return figure


def _matrix(op: str, rows: Sequence[Row]) -> Figure:
    """Which variant is right on which case; grey was not run."""
    cases = list(dict.fromkeys(row.case for row in rows))
    variants = list(dict.fromkeys((row.variant, row.target) for row in rows))
    codes = [[STATUSES.index("UNAVAILABLE")] * len(cases) for _ in variants]
    figure = Figure(figsize=(3 + 0.42 * len(cases), 3 + 0.32 * len(variants)))
    axes = figure.subplots()
    for row in rows:
        place = variants.index((row.variant, row.target)), cases.index(row.case)
        codes[place[0]][place[1]] = STATUSES.index(row.status)
        axes.text(place[1], place[0], _STATUS_SIGNS[row.status], ha="center", va="center")
    axes.imshow(codes, cmap=ListedColormap(_STATUS_COLORS), vmin=0, vmax=3, aspect="auto")
    axes.set_xticks(range(len(cases)), [_wrapped(c) for c in cases], rotation=90, fontsize=7)
    axes.set_yticks(range(len(variants)), [f"{v} on {t}" for v, t in variants], fontsize=8)
    axes.set_xticks([place - 0.5 for place in range(1, len(cases))], minor=True)
    axes.set_yticks([place - 0.5 for place in range(1, len(variants))], minor=True)
    axes.grid(which="minor", color="white")
    axes.tick_params(which="minor", length=0)
    axes.set_title(f"{op}: green PASSED, red W wrong or E error, grey not run")
    return figure


def _wrapped(case: str, width: int = 44) -> str:
    lines = [""]
    for part in case.split("-"):
        if lines[-1] and len(lines[-1]) + len(part) >= width:
            lines.append("")
        lines[-1] += ("-" if lines[-1] else "") + part
    return "\n".join(lines)
