"""Root mean square norm of rows, as the latents of q and kv have it."""

from __future__ import annotations

from typing import Any

from sandbox.kernels import require
from sandbox.kernels.op import Output, operation
from sandbox.kernels.rms_norm import cases, reference


@operation(
    reference=reference.rms_norm,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    returns=("out",),
    main_argument="x",
)
def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6, out: Any = None) -> dict[str, Any]:
    """Each row over the root of its mean square, times a weight a column.

    `weight * round(x * rsqrt(mean(x ** 2) + eps))`, as Hugging Face's norms of DeepSeek models have
    it: float32 inside, rounded to x's dtype before the product with the weight, which is rounded
    once more. A row whose squares sum to more than a float32 holds becomes 0, as there; one of
    zeros with `eps=0` NaN. A NaN stays in its row.

    Args:
        x: `[T, D]`, float32, float16 or bfloat16; rows may be strided (columns of a wider
            projection), the last axis is contiguous.
        weight: `[D]` of x's dtype, contiguous.
        eps: a finite number of 0 or more.
        out: like `x`, rows with strides of their own; may be `x` itself and shares no other memory
            with the inputs. None allocates.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, or `out`
            shares memory with an array that it is not; nothing has been launched.
    """
    require.rows(x, "x", "D")
    require.array(weight, "weight", "D")
    require.same_dtype(weight, "weight", x, "x")
    require.strided_rows(weight, "weight")
    require.size(weight, "weight", 0, x.shape[1], "x's D")
    found = require.not_negative(eps, "eps")
    inputs, axes = {"x": x, "weight": weight}, {"out": ("tokens", "D")}
    require.outputs({"out": out}, axes, inputs, lambda output, other: other.name == "x")
    return {"eps": found, "out": Output(tuple(x.shape), x.dtype)}
