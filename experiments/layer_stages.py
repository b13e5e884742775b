"""What the parts of a layer's step take: the arithmetic of spans between marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

STAGES = (
    "projections",
    "norm",
    "absorb",
    "insert",
    "decode attention",
    "value projection",
    "up-projection",
    "prefill attention",
    "gather",
    "exchange",
    "concat",
    "merge",
    "output gate",
    "quantize",
    "output projection",
)
"""As `MLALayer.on_stage` is told of them, in about the order of a step."""
ATTENTION_AND_GEMMS = {
    "projections",
    "absorb",
    "decode attention",
    "value projection",
    "up-projection",
    "prefill attention",
    "output projection",
}


def by_stage(spans: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Times of a step's spans, summed by stage."""
    found: dict[str, float] = {}
    for stage, us in spans:
        found[stage] = found.get(stage, 0.0) + us
    return found


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each stage over steps that all went through the same ones."""
    return {stage: float(median(each[stage] for each in rounds)) for stage in rounds[0]}


def attention_and_gemm_percent(stages_us: Mapping[str, float]) -> float | None:
    """What attention and matrix products take of all stages."""
    total = sum(stages_us.values())
    if not total:
        return None
    kept = sum(us for stage, us in stages_us.items() if stage in ATTENTION_AND_GEMMS)
    return 100 * kept / total
