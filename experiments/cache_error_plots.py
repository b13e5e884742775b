"""Pictures of what cache formats err."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from experiments.cache_error import ErrorRow

STAGES = {
    "latent_rms": "latent, rms error over rms",
    "key_rms": "key, rms error over rms",
    "score_rms": "score, rms error",
    "tv": "attention, total variation",
    "output_rms": "output, relative error of the median head",
}
APART = 8  # bytes


def plot(rows: Sequence[ErrorRow], title: str, path: Path) -> None:
    """The output's error against bytes a token, and the error of every stage, as a PNG file."""
    own = [row for row in rows if row.samples]
    figure = Figure(figsize=(14, 1.5 + 0.42 * max(8, len(own))), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = matplotlib.colormaps["tab20"].colors
    for index, (row, color) in enumerate(zip(own, colors)):
        alike = sum(other.bytes_per_token == row.bytes_per_token for other in own[:index])
        place = row.bytes_per_token + APART * alike
        middle, (low, high) = row.median("output_rms"), row.range("output_rms")
        if middle > 0:
            look = {"marker": "o" if row.as_meant else "x", "color": color, "capsize": 3}
            spread = [[middle - low], [high - middle]]
            left.errorbar(place, middle, spread, label=row.name, **look)
    left.set_yscale("log")
    left.set_xlabel("bytes a token and layer; equal ones are drawn side by side")
    left.set_ylabel("relative error of the attention output, median head; bars: all seeds")
    left.grid(alpha=0.3)
    left.legend(fontsize=8, title="x: not as meant")
    height = 0.85 / len(STAGES)
    for index, (metric, label) in enumerate(STAGES.items()):
        places = [place + (index + 0.5) * height - 0.425 for place in range(len(own))]
        right.barh(places, [row.median(metric) or 0 for row in own], height, label=label)
    right.set_xscale("log")
    right.set_xlim(left=1e-4)
    right.set_yticks(range(len(own)), [f"{row.name}, {row.bytes_per_token} B" for row in own])
    right.set_ylim(len(own) - 0.5, -0.5)
    right.set_xlabel("error, median over the seeds")
    right.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110, bbox_inches="tight")
