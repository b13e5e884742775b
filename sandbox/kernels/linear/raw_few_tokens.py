from pathlib import Path
from typing import Any

from sandbox import arrays
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.cuda.device import device_info
from sandbox.kernels.linear import linear
from sandbox.kernels.strides import row_arrays
from sandbox.kernels.vectors import widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "linear_few_tokens", overlap=True)
THREADS = 256
"""Of a block, or as many as share a row, if that is more."""
MOST_TOKENS = 2
FEW_VECTORS, MOST_VECTORS = 4, 8
"""That a thread keeps of each token and has on the way of a row, as long as there are threads."""
MOST_LANES = 512
HOST_BLOCKS = 5
"""On the host, few enough for rows to follow each other."""


def lanes_for(vectors: int) -> int:
    """Threads that share a row of so many vectors."""
    lanes = 32
    while lanes < MOST_LANES and lanes * FEW_VECTORS < vectors:
        lanes *= 2
    return lanes


def _unsuitable(x: Any, weight: Any, **others: Any) -> str | None:
    tokens, columns = x.shape
    if tokens > MOST_TOKENS:
        return f"takes up to {MOST_TOKENS} tokens, not {tokens}"
    vector = widest_vector(x, weight)
    if columns * x.dtype.itemsize > MOST_LANES * MOST_VECTORS * vector:
        return f"rows of {columns} elements, {vector} bytes at a time, are too long for a block"
    return None


@linear.variant("raw_few_tokens", kind="cuda", supports=_unsuitable, preference=40)
def raw_few_tokens(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """For one or two tokens, which stay in registers: rows of the weight go by, once each."""
    (tokens, columns), outputs = x.shape, weight.shape[0]
    if tokens == 0:
        return
    vector = widest_vector(x, weight)
    vectors = columns * x.dtype.itemsize // vector
    lanes = lanes_for(vectors)
    threads = max(THREADS, lanes)
    resident = 1 if threads > THREADS else 4 - tokens
    device = device_info() if arrays.is_gpu(x) else None
    blocks = device.sms * max(2, resident) if device else HOST_BLOCKS
    KERNEL(
        min(blocks, -(-outputs // (threads // lanes))),
        threads,
        *row_arrays(x, weight),
        bias,
        *row_arrays(out),
        outputs,
        columns,
        macros={
            "ELEMENT": x.dtype,
            "VECTOR": vector,
            "TOKENS": tokens,
            "LANES": lanes,
            "PER_LANE": -(-vectors // lanes),
            "THREADS": threads,
            "RESIDENT": resident,
        },
    )
