"""Tables of a whole layer: contenders by problem, its stages, and what each swap costs where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from experiments.layer_contenders import LAYER
from experiments.layer_rows import LayerRow
from experiments.layer_stages import STAGES
from experiments.tables import HOST_SECONDS, Column, number


def _short_number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


_FIRST = (
    Column("contender", lambda row: row.variant, right=False),
    Column("status", lambda row: row.status, right=False),
    Column("error/\nallowed", lambda row: number(row.error, 2)),
)
GPU_COLUMNS = (
    Column("", lambda row: str(row.rank or "")),
    *_FIRST,
    Column("median\nus", lambda row: number(row.median_us)),
    Column("IQR\nus", lambda row: number(row.iqr_us, 2)),
    Column("x\nlayer", lambda row: number(row.speedup)),
    Column("tokens/s", lambda row: number(row.tokens_per_s)),
    Column("TFLOP/s", lambda row: number(row.tflop_per_s)),
    Column("% of\nlimit", lambda row: number(row.percent_of_limit)),
    Column("% att.\n+GEMM", lambda row: number(row.attention_and_gemm_percent)),
    Column("eager\ncall us", lambda row: number(row.eager_launch_us)),
    Column("own\nMB", lambda row: number(_megabytes(row))),
    Column("L2", lambda row: row.l2 or ""),
    Column("by", lambda row: row.method or ""),
)
CPU_COLUMNS = (
    *_FIRST,
    Column("rms\nerror", lambda row: _short_number(row.rms_error)),
    Column("largest\nerror", lambda row: _short_number(row.max_error)),
    Column("on", lambda row: row.target, right=False),
    Column(HOST_SECONDS.replace(", ", ",\n"), lambda row: number(row.check_host_seconds, 2)),
)


def columns_for(rows: Sequence[LayerRow]) -> tuple[Column, ...]:
    return GPU_COLUMNS if any(row.target == "gpu" for row in rows) else CPU_COLUMNS


def _megabytes(row: LayerRow) -> float | None:
    taken = row.workspace_bytes if row.workspace_bytes is not None else row.peak_bytes
    return None if taken is None else taken / 1e6


def _short(row: LayerRow) -> str:
    """A case's name without what all cases of a run have in common."""
    return row.case.removeprefix(f"{row.dims_name}-{row.dtype}-")


def stage_lines(rows: Iterable[LayerRow]) -> list[str]:
    """The stages of each plain layer that was timed, one line a problem."""
    return [
        f"{_short(row)}, {row.attention_and_gemm_percent:.0f}% in attention and GEMMs: "
        + ", ".join(_stages(row.stages_us))
        for row in rows
        if row.variant == LAYER and row.stages_us
    ]


def _stages(stages_us: Mapping[str, float]) -> Iterator[str]:
    """Each stage's time and share, in the order of a step."""
    total = sum(stages_us.values())
    for stage in sorted(stages_us, key=STAGES.index):
        us = stages_us[stage]
        yield f"{stage} {number(us)} ({100 * us / total:.0f}%)"


def swap_lines(rows: Sequence[LayerRow]) -> list[str]:
    """For each swap, the largest effect first, its time over the plain layer's by problem."""
    layers = {row.case: row.median_us for row in rows if row.variant == LAYER and row.median_us}
    ratios: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        if row.variant.startswith(f"{LAYER}[") and row.median_us and row.case in layers:
            ratio = row.median_us / layers[row.case]
            ratios.setdefault(row.variant, []).append((ratio, _short(row)))
    by_effect = sorted(ratios.items(), key=lambda pair: -max(abs(r - 1) for r, _ in pair[1]))
    return [
        f"{name}: " + ", ".join(f"{ratio:.2f}x on {case}" for ratio, case in found)
        for name, found in by_effect
    ]


def memory_lines(rows: Sequence[LayerRow]) -> list[str]:
    """The weights, and cache and workspace of each problem's layers."""
    found = {row.case: row for row in rows if row.workspace_bytes is not None}
    if not found:
        return []
    parts = (
        f"{_short(row)} {number(row.cache_bytes / 1e6)} + {number(row.workspace_bytes / 1e6)} MB"
        for row in found.values()
    )
    weights = next(iter(found.values())).weight_bytes
    return [f"weights {number(weights / 1e6)} MB; cache + workspace: {', '.join(parts)}"]


def sections(rows: Sequence[LayerRow]) -> list[tuple[str, list[str]]]:
    """Headings and lines of what goes with the table, without those that are empty."""
    found = [
        ("which variant matters where: a swap's time over the layer's", swap_lines(rows)),
        ("stages of the layer, us", stage_lines(rows)),
        ("memory", memory_lines(rows)),
    ]
    return [(heading, lines) for heading, lines in found if lines]
