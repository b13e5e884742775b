from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert.launch import widest_vector
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.linear import linear

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "linear_few_tokens", overlap=True)
THREADS = 256
MOST_TOKENS = 4
VECTORS_A_LANE = 8
"""Of a weight's row, or fewer, while a block has threads enough."""


def _unsuitable(x: Any, weight: Any, out: Any, **others: Any) -> str | None:
    if x.shape[0] > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens, not {x.shape[0]}"
    if widest_vector(x, weight) < 4:
        return "rows of x and weight are not at multiples of 4 bytes"
    return None


@linear.variant("raw_few_tokens", kind="cuda", supports=_unsuitable, preference=40)
def raw_few_tokens(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """For up to 4 tokens: rows of the weight go by once, prefetched while the kernel ahead ends."""
    (tokens, columns), outputs = x.shape, weight.shape[0]
    if tokens == 0:
        return
    item, vector = x.dtype.itemsize, widest_vector(x, weight)
    lanes = 32
    while lanes < THREADS and columns * item > VECTORS_A_LANE * lanes * vector:
        lanes *= 2
    at_once = 1 << (tokens - 1).bit_length()
    rows = max(2, at_once)
    KERNEL(
        -(-outputs // (rows * (THREADS // lanes))),
        THREADS,
        x,
        x.strides[0] // item,
        weight,
        weight.strides[0] // item,
        bias,
        out,
        out.strides[0] // item,
        tokens,
        outputs,
        columns,
        macros={
            "ELEMENT": x.dtype,
            "VECTOR": vector,
            "TOKENS": at_once,
            "ROWS": rows,
            "LANES": lanes,
            "THREADS": THREADS,
        },
    )
