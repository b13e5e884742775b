"""Pictures of a whole layer's run: times and correctness as of any op, and stages stacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from experiments import plots
from experiments.layer_rows import LayerRow
from experiments.layer_stages import ATTENTION_AND_GEMMS, STAGES


def plot(rows: Sequence[LayerRow], folder: Path) -> list[Path]:
    """PNG files in `folder`; those of times only where there are any."""
    made = plots.plot(rows, folder)
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
    shares, times = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    colors = matplotlib.colormaps["tab20"].colors
    totals = [sum(row.stages_us.values()) for row in rows]
    present = [stage for stage in STAGES if any(stage in row.stages_us for row in rows)]
    left = [0.0] * len(rows)
    for stage in present:
        widths = [100 * row.stages_us.get(stage, 0.0) / sum for row, sum in zip(rows, totals)]
        shares.barh(
            range(len(rows)),
            widths,
            left=left,
            label=stage,
            color=colors[STAGES.index(stage)],
            hatch="" if stage in ATTENTION_AND_GEMMS else "///",
            edgecolor="white",
            linewidth=0.3,
        )
        left = [start + width for start, width in zip(left, widths)]
    times.barh(range(len(rows)), totals, color="#999999")
    times.set_xscale("log")
    times.set_xlabel("sum of stages, us")
    shares.set_xlabel("% of the step; hatched: neither attention nor GEMM")
    labels = [f"{row.case}\n{row.variant}" for row in rows]
    shares.set_yticks(range(len(rows)), labels, fontsize=6)
    shares.set_ylim(len(rows) - 0.5, -0.5)
    times.legend(*shares.get_legend_handles_labels(), fontsize=7, loc="center left",
                 bbox_to_anchor=(1.01, 0.5))  # fmt: skip
    figure.suptitle("stages of the layer, medians of eager steps on one stream")
    return figure
