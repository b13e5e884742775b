"""Rows of a whole layer's contenders: those of any comparison, and what a layer has besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments import layer_cost, layer_stages
from experiments.layer_contenders import LAYER, target_of
from experiments.layer_problems import Problem
from experiments.results import Row, Timing, with_times


@dataclass(frozen=True)
class LayerRow(Row):
    """One contender on one problem; `variant` is its name, and the baseline is the plain layer.

    `error` is over the one allowed; `rms_error` and `max_error` are those of the token that has the
    largest, over the rms of its values. `stages_us` are medians of eager steps on one stream, and
    `attention_and_gemm_percent` what `layer_stages.ATTENTION_AND_GEMMS` take of them.
    `workspace_bytes` is what the layers of the problem share so far, `peak_bytes` what torch lends
    to a step.
    """

    phase: str = ""
    cache_format: str = ""
    rms_error: float | None = None
    max_error: float | None = None
    one_minus_cosine: float | None = None
    tokens_per_s: float | None = None
    attention_and_gemm_percent: float | None = None
    weight_bytes: int = 0
    cache_bytes: int = 0
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    stages_us: Mapping[str, float] = field(default_factory=dict)


def blank(problem: Problem, contender: str, gpu: bool, reproduce: str) -> LayerRow:
    """A row with all that the problem and the name tell."""
    cost, shape, work = layer_cost.step_cost(problem), problem.shape, problem.workload
    return LayerRow(
        op="layer",
        variant=contender,
        kind=LAYER if contender.startswith(LAYER) else "torch",
        target=target_of(contender, gpu),
        baseline=contender == LAYER,
        case=problem.name,
        dims_name=problem.dims_name,
        dims=asdict(problem.dims),
        dtype=problem.dtype,
        options={
            "format": problem.cache_format,
            "gate": problem.gate,
            "block_size": problem.block_size,
            "workspace_rows": problem.workspace_rows,
        },
        workload={
            "name": work.name,
            "requests": shape.requests,
            "context_tokens": work.context_tokens,
            "query_tokens": work.query_tokens,
            "longest_context": shape.context,
        },
        scaled="",
        size="large" if gpu else "medium",
        seed=problem.seed,
        bytes=cost.bytes,
        flops=cost.flops,
        reproduce=reproduce,
        phase=shape.phase,
        cache_format=problem.cache_format,
        weight_bytes=layer_cost.weight_bytes(problem),
        cache_bytes=shape.requests
        * (shape.context + shape.tokens)
        * problem.format.row_bytes(problem.dims),
    )


def timed(
    rows: Iterable[LayerRow], answer: Mapping[str, Any], gemm_tflop_per_s: float | None
) -> list[LayerRow]:
    """The rows of one problem with what `layer_timing.time_contenders` answered."""
    timings = {name: Timing(**columns) for name, columns in answer["timings"].items()}
    found = []
    for row in with_times(rows, timings, gemm_tflop_per_s):
        if row.median_us is not None:
            stages = answer.get("stages", {}).get(row.variant, {})
            row = replace(
                row,
                tokens_per_s=row.workload["query_tokens"] / row.median_us * 1e6,
                stages_us=stages,
                attention_and_gemm_percent=layer_stages.attention_and_gemm_percent(stages),
            )
        found.append(row)
    return found
