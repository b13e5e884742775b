"""Pictures of a whole layer's run: times and correctness as of any op, and stages stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from experiments import plots
from experiments.layer_contenders import LAYER
from experiments.layer_rows import LayerRow
from experiments.layer_stages import ATTENTION_AND_GEMMS, STAGES
from experiments.tables import number


def plot(rows: Sequence[LayerRow], folder: Path) -> list[Path]:
    """PNG files in `folder`; those of times only where there are any. Swaps have their own."""
    swaps = [row for row in rows if row.variant.startswith(f"{LAYER}[")]
    cases = {row.case for row in swaps}
    beside = [row for row in rows if row in swaps or (row.variant == LAYER and row.case in cases)]
    made = plots.plot([row for row in rows if row not in swaps], folder)
    if swaps:
        made += plots.plot([replace(row, op="layer_swaps") for row in beside], folder)
    staged = [row for row in rows if row.stages_us]
    if staged:
        path = folder / "layer_stages.png"
        _stages(staged).savefig(path, dpi=110, bbox_inches="tight")
        made.append(path)
    return made


def _stages(rows: Sequence[LayerRow]) -> Figure:
    """A bar of each layer: what its stages take of a step that computes one after the other.

    Attention and GEMMs are plain, what is around them is hatched.
    """
    figure = Figure(figsize=(13, 1.8 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colors = matplotlib.colormaps["tab20"].colors
    totals = [sum(row.stages_us.values()) for row in rows]
    left = [0.0] * len(rows)
    for stage in STAGES:
        if not any(stage in row.stages_us for row in rows):
            continue
        shares = [100 * row.stages_us.get(stage, 0.0) / all_us for row, all_us in zip(rows, totals)]
        axes.barh(
            range(len(rows)),
            shares,
            left=left,
            label=stage,
            color=colors[STAGES.index(stage)],
            hatch="" if stage in ATTENTION_AND_GEMMS else "///",
            edgecolor="white",
            linewidth=0.3,
        )
        left = [start + share for start, share in zip(left, shares)]
    for place, total in enumerate(totals):
        axes.text(100.5, place, f"{number(total)} us", fontsize=7, va="center")
    axes.set_xlim(0, 108)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("% of the step; hatched: neither attention nor GEMM")
    axes.set_yticks(range(len(rows)), [f"{row.case}\n{row.variant}" for row in rows], fontsize=6)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle("stages of the layer, medians of eager steps on one stream")
    return figure
