"""Projections: rows times the transpose of a weight."""

from __future__ import annotations

from typing import Any

from sandbox.kernels import require
from sandbox.kernels.linear import cases, reference
from sandbox.kernels.op import Output, operation


@operation(
    reference=reference.linear,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    returns=("out",),
    main_argument="x",
)
def linear(x: Any, weight: Any, *, bias: Any = None, out: Any = None) -> dict[str, Any]:
    """`x @ weight.T + bias`: summed in float32 and rounded once.

    A NaN in a row of x stays in that row of `out`.

    Args:
        x: `[T, I]`, float32, float16 or bfloat16; rows may be strided, the last axis is contiguous.
        weight: `[O, I]` of x's dtype, as torch's `Linear` has it; rows may be strided.
        bias: `[O]` of x's dtype, contiguous, or None.
        out: `[T, O]` of x's dtype, rows may be strided; shares no memory with the inputs. None
            allocates.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, or `out`
            shares memory with another array; nothing has been launched.
    """
    require.rows(x, "x", "I")
    require.array(weight, "weight", "O", "I")
    require.same_dtype(weight, "weight", x, "x")
    require.strided_rows(weight, "weight")
    require.size(weight, "weight", 1, x.shape[1], "x's I")
    if weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: O must be positive")
    if bias is not None:
        require.array(bias, "bias", "O")
        require.same_dtype(bias, "bias", x, "x")
        require.strided_rows(bias, "bias")
        require.size(bias, "bias", 0, weight.shape[0], "weight's O")
    inputs = {"x": x, "weight": weight, "bias": bias}
    require.outputs({"out": out}, {"out": ("tokens", "O")}, inputs)
    return {"out": Output((x.shape[0], weight.shape[0]), x.dtype)}
