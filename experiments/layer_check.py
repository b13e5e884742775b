"""Whether a layer's outputs, and the cache rows that it wrote, are close enough to the oracle's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.layer_oracle import Expected
from experiments.layer_problems import Inputs

ALLOWED = {
    "float32": (2e-5, 2e-4),
    "float16": (5e-3, 4e-2),
    "bfloat16": (2e-2, 1.5e-1),
}
"""Of each token's output: the rms of its errors, and the largest, over the rms of its values.

They are errors of a whole layer, five roundings to the dtype one after the other, and the same for
every cache format, as the oracle reads what the cache restores to. A decode may be away from it by
`Expected.by_codes` more.
"""
FORMAT_ERRORS = 1.5
"""What a row in the cache may be away from the exact one, over what the format itself loses."""


@dataclass(frozen=True)
class Judgement:
    """`error` is the largest error over the one allowed; the others are of the outputs alone."""

    status: str
    message: str = ""
    error: float | None = None
    rms_error: float | None = None
    max_error: float | None = None
    one_minus_cosine: float | None = None


def judge(inputs: Inputs, out: Any, expected: Expected, writes_cache: bool) -> Judgement:
    """PASSED, or WRONG with what is wrong.

    Args:
        out: `[T, H]` of the layer's dtype.
        writes_cache: whether the new tokens' rows should be in the inputs' own cache now.
    """
    xp, allowed = inputs.xp, ALLOWED[inputs.problem.dtype]
    got, want = out.astype(expected.out.dtype), expected.out
    bad = int((~xp.isfinite(got)).sum())
    if bad:
        return Judgement("WRONG", f"{bad} of {got.size} outputs are NaN or infinite", float("inf"))
    size = _rms(xp, want)
    off = got - want
    rms = _rms(xp, off) / size
    largest = xp.abs(off).max(axis=1) / size
    cosine = (got * want).sum(axis=1) / xp.sqrt((got**2).sum(axis=1) * (want**2).sum(axis=1))
    allowed_rms, allowed_largest = (xp.full_like(rms, limit) for limit in allowed)
    if expected.by_codes is not None:
        allowed_rms += _rms(xp, expected.by_codes) / size
        allowed_largest += xp.abs(expected.by_codes).max(axis=1) / size
    ratios = xp.maximum(rms / allowed_rms, largest / allowed_largest)
    worst = int(ratios.argmax())
    errors = (float(ratios[worst]), float(rms.max()), float(largest.max()))
    distance = float(xp.nan_to_num(1 - cosine, nan=1.0).max())
    if errors[0] > 1:
        return Judgement(
            "WRONG",
            f"token {worst}: rms error {float(rms[worst]):.2g} of its values' rms (allowed "
            f"{float(allowed_rms[worst]):.2g}), largest {float(largest[worst]):.2g} (allowed "
            f"{float(allowed_largest[worst]):.2g})",
            *errors,
            distance,
        )
    message = _rows_are_wrong(inputs, expected) if writes_cache else None
    return Judgement("WRONG" if message else "PASSED", message or "", *errors, distance)


def _rms(xp: Any, values: Any) -> Any:
    """Of each row; a row of zeros has the least there is."""
    return xp.maximum(xp.sqrt((values**2).mean(axis=1)), np.finfo(np.float32).tiny)


def _rows_are_wrong(inputs: Inputs, expected: Expected) -> str | None:
    """What is wrong with the new tokens' rows in the cache, if anything."""
    xp, problem = inputs.xp, inputs.problem
    fmt, dims, scale = problem.format, problem.dims, inputs.k_scale
    rows = expected.rows.astype(np.float32)
    meant = fmt.decode(fmt.encode(rows, dims, k_scale=scale), dims, k_scale=scale)
    found = fmt.decode(inputs.new_rows(), dims, k_scale=scale)
    size = _rms(xp, rows)
    limit = FORMAT_ERRORS * _rms(xp, meant - rows) / size + ALLOWED[problem.dtype][0]
    off = _rms(xp, found - rows) / size
    wrong = ~(off <= limit)
    if not wrong.any():
        return None
    token = int(wrong.argmax())
    return (
        f"the cache row of token {token}: rms error {float(off[token]):.2g} of its values' rms "
        f"(allowed {float(limit[token]):.2g})"
    )
