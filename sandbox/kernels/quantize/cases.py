"""Problems for the quantizing ops: what the arrays hold, how they lie in memory, what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance
from sandbox.kernels.quantize.reference import BLOCK

tokens = Workload.of_tokens
ODD = MLADims(3, 56, 43, 25, 6, 17)
"""Rows of 51 values: accesses of one element."""
WIDE_HEAD = MLADims(3, 56, 40, 24, 8, 128)
"""Rows of three groups of 128."""

SCALE = 0.0125
"""No power of two; the largest values saturate."""

TIES = (1.0625, 1.1875, 17, 19, 2**-10, 3 * 2**-10, -5 * 2**-10)
TIES += (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5)
"""Of E4M3, and of E2M1."""

HOSTILE = (
    (0.0, -0.0),
    (448, *TIES),
    (6, *(tie for tie in TIES if abs(tie) < 6)),
    (np.nan, 1, -2, 3e-3),
    (np.inf, 1, -2, 5, -np.inf, 2**-9),
    (np.nan, np.inf, -np.nan, -np.inf),
    (1e-12, -3e-13, 5e-11),
    (1e-40, -1e-41, 0),
    (65504, -1, 2, 30000),
    (3.4e38, -1e38, 1e30, -1),
    (464, 465, -1000, 449),
)
"""What whole groups of a small problem hold, in turn: zeros, ties at a scale of 1, what is not
finite, less than the least scale is for, subnormals, the largest numbers."""


def width_of(case: Case) -> int:
    return case.dims.N * case.dims.V


def group_of(case: Case) -> int:
    """The option `group`, or of W's powers of two the largest up to 128."""
    return case.options.get("group") or math.gcd(width_of(case), 128)


def static_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Rows of `N * V` values. Options: `views` (default: x and outputs are columns of wider arrays,
    one element off for an odd W)."""
    arguments = {"x": _values(case, xp, width_of(case), SCALE), "scale": _scalar(xp, SCALE)}
    return arguments | _codes(case, xp, out=width_of(case))


def groups_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options: `views` as for `static_inputs`; `group`; `scales` and `layout` are the op's
    `scale_format` and `scale_layout`; `strided` (scales of the caller, every third column)."""
    width, group = width_of(case), group_of(case)
    arguments = {
        "x": _values(case, xp, group, 1.0),
        "group_size": group,
        "scale_format": case.options.get("scales", "float32"),
        "scale_layout": case.options.get("layout", "row"),
    }
    if case.options.get("strided"):
        wide = c.unwritten(xp, (case.workload.query_tokens, 3 * width // group), np.float32)
        arguments["out_scales"] = wide[:, 1::3]
    return arguments | _codes(case, xp, out=width)


def nvfp4_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options: `views` as for `static_inputs`; `global_scale`."""
    width, scale = width_of(case), case.options.get("global_scale", 2.0**-7)
    arguments = {"x": _values(case, xp, BLOCK, scale), "global_scale": _scalar(xp, scale)}
    return arguments | _codes(case, xp, out=width // 2, out_scales=width // BLOCK)


def _scalar(xp: Any, value: float) -> Any:
    return xp.asarray(np.array([value], np.float32))


def _values(case: Case, xp: Any, group: int, scale: float) -> Any:
    """Normal values; in small problems most groups hold what is hostile, times `scale`."""
    shape = (case.workload.query_tokens, width_of(case))
    if case.options.get("views", True):
        x = c.column_slice(xp, shape, case.dtype, case.seed, _before(case))
    else:
        x = c.normal(xp, shape, case.dtype, case.seed)
    if case.size == "small" and x.size:
        count = -(-x.size // group)
        groups = c.normal(np, (count, group), np.dtype(np.float32), case.seed + 1)
        for kind, pattern in enumerate(HOSTILE):
            row = np.resize(np.array(pattern, np.float32), group)
            groups[kind :: len(HOSTILE) + 2] = _times(row, scale)
        with np.errstate(over="ignore"):
            x[...] = xp.asarray(groups.astype(case.dtype).ravel()[: x.size].reshape(shape))
    return x


def _times(row: np.ndarray, scale: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        return row * np.float32(scale)


def _codes(case: Case, xp: Any, **widths: int) -> dict[str, Any]:
    """Outputs of bytes as columns of wider arrays, for problems with views."""
    if not case.options.get("views", True):
        return {}
    count, before = case.workload.query_tokens, _before(case)
    return {
        name: c.unwritten(xp, (count, width + 32), np.uint8)[:, before : before + width]
        for name, width in widths.items()
    }


def _before(case: Case) -> int:
    """Columns of a wider array before those of a view."""
    return 1 if case.dims.V % 2 else 16


def static_cases(purpose: str) -> Iterable[Case]:
    if purpose == "compare":
        return _compare()
    return _conformance(("float32", ODD, "odd", {}), ("bfloat16", ODD, "odd", {}))


def groups_cases(purpose: str) -> Iterable[Case]:
    if purpose == "compare":
        aligned = {"scales": "ue8m0", "layout": "column"}
        return _compare({"group": 64}, aligned)
    return _conformance(
        ("float32", PRESETS["tiny"], "tiny", {"group": 24, "strided": True}),
        ("bfloat16", PRESETS["tiny"], "tiny", {"scales": "ue8m0", "layout": "column"}),
        ("bfloat16", WIDE_HEAD, "wide_head", {"scales": "ue8m0", "layout": "column"}),
        ("bfloat16", WIDE_HEAD, "wide_head", {"layout": "column"}),
    )


def nvfp4_cases(purpose: str) -> Iterable[Case]:
    if purpose == "compare":
        return _compare()
    return _conformance(
        ("float32", PRESETS["tiny"], "tiny", {"global_scale": 0.0123}),
        ("bfloat16", PRESETS["tiny"], "tiny", {"global_scale": 1e-37}),
        ("bfloat16", PRESETS["tiny"], "tiny", {"global_scale": 3e36}),
    )


def _conformance(*small: tuple[str, MLADims, str, dict[str, Any]]) -> Iterable[Case]:
    """What all three ops have, and small problems of one."""
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    bf16, fp16 = c.dtypes("bfloat16", "float16")
    yield Case(tiny, "tiny", bf16, tokens(9))
    yield Case(tiny, "tiny", bf16, tokens(0))
    for name, dims, dims_name, options in small:
        yield Case(dims, dims_name, c.dtypes(name)[0], tokens(9), options)
    yield Case(v3, "deepseek_v3", bf16, tokens(5), {"views": False}, "medium")
    yield Case(v3, "deepseek_v3", fp16, tokens(3), {}, "medium")


def _compare(*large: dict[str, Any]) -> Iterable[Case]:
    bf16, options = c.dtypes("bfloat16")[0], {"views": False}
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(PRESETS["tiny"], "tiny", dtype, tokens(9), options)
    v3 = PRESETS["deepseek_v3"]
    for count in (1, 128, 8192):
        yield Case(
            v3, "deepseek_v3", bf16, tokens(count), options, "medium" if count <= 128 else "large"
        )
    for others in large:
        yield Case(v3, "deepseek_v3", bf16, tokens(8192), options | others, "large")


def _workload(multiple: int, case: Case) -> Case | None:
    """The outputs of a batch; None where there is none, or of a width that the op does not take."""
    return case if case.workload.query_tokens and width_of(case) % multiple == 0 else None


def static_workload(*problem: Any) -> Case | None:
    return _workload(1, _of_workload(*problem))


def groups_workload(*problem: Any) -> Case | None:
    return _workload(8, _of_workload(*problem))


def nvfp4_workload(*problem: Any) -> Case | None:
    return _workload(BLOCK, _of_workload(*problem))


def _of_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case:
    return Case(dims, dims_name, dtype, workload, {"views": False}, size)


def static_cost(case: Case) -> Cost:
    return _cost(case, [1])


def groups_cost(case: Case) -> Cost:
    return _cost(case, [1, 4 / group_of(case)])


def nvfp4_cost(case: Case) -> Cost:
    return _cost(case, [1 / 2, 1 / BLOCK])


def _cost(case: Case, written: Sequence[float]) -> Cost:
    """Each value read once; so many bytes written for each."""
    values = case.workload.query_tokens * width_of(case)
    return Cost(
        bytes_read=values * case.dtype.itemsize,
        bytes_written=sum(round(values * each) for each in written),
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Every code and every scale, bit for bit."""
    return {"out": Tolerance(), "out_scales": Tolerance()}
