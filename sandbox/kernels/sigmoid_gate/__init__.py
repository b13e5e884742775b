"""Attention's output times the sigmoid of a gate, before the output projection."""

from __future__ import annotations

from typing import Any

from sandbox.kernels import require
from sandbox.kernels.op import Output, operation
from sandbox.kernels.sigmoid_gate import cases, reference


@operation(
    reference=reference.sigmoid_gate,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    returns=("out",),
    main_argument="x",
)
def sigmoid_gate(x: Any, gate: Any, *, out: Any = None) -> dict[str, Any]:
    """`x * sigmoid(gate)`, element by element; float32 inside, rounded once.

    An x of 0 stays 0, with its sign, whatever its gate, NaN and infinities included: rows of
    padding have an attention of 0 and a gate of garbage. Elsewhere a NaN in either is a NaN. No
    gate overflows: inf is a factor of 1, -inf one of 0.

    Args:
        x: `[T, W]`, float32, float16 or bfloat16, W = N * V after an attention; rows may be
            strided, the last axis is contiguous.
        gate: like `x`, rows with strides of their own (columns of a wider projection).
        out: like `x`, rows with strides of their own; may be `x` or `gate` itself and shares no
            other memory with them. None allocates.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, or `out`
            shares memory with an array that it is not; nothing has been launched.
    """
    require.rows(x, "x", "W")
    shape = tuple(x.shape)
    require.array(gate, "gate", "tokens", "W")
    require.same_dtype(gate, "gate", x, "x")
    require.strided_rows(gate, "gate")
    if tuple(gate.shape) != shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, expected {shape} as x")
    inputs = {"x": x, "gate": gate}
    require.outputs({"out": out}, {"out": ("tokens", "W")}, inputs, lambda output, other: True)
    return {"out": Output(shape, x.dtype)}
