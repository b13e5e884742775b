from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.rms_norm import rms_norm
from sandbox.kernels.strides import row_arrays
from sandbox.kernels.vectors import widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "rms_norm_vector", overlap=True)
SMALL_BLOCK = 128
MOST_LANES = 1024
MOST_ROW_BYTES = 64 * 1024
"""With 8 vectors a thread and all of a block's registers."""


def shares(vectors: int) -> tuple[int, int]:
    """Threads that share a row of so many vectors, and vectors that each has: few, so that a row
    takes little longer than its trip to memory; in one warp while two a lane are enough."""
    if vectors <= 64:
        lanes = min(32, _power_of_two(vectors))
        return lanes, -(-vectors // lanes)
    per_lane = min(8, _power_of_two(-(-vectors // 256)))
    return -(-vectors // (32 * per_lane)) * 32, per_lane


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _row_too_long(x: Any, weight: Any, out: Any, **others: Any) -> str | None:
    vector, row_bytes = widest_vector(x, weight, out), x.shape[1] * x.dtype.itemsize
    if row_bytes > MOST_ROW_BYTES or shares(row_bytes // vector)[0] > MOST_LANES:
        return f"a row of {row_bytes} bytes, {vector} at a time, does not fit a block's registers"
    return None


@rms_norm.variant("raw_vector", kind="cuda", supports=_row_too_long, preference=30)
def raw_vector(x: Any, weight: Any, eps: float, out: Any) -> None:
    """Part of a warp or a block a row, kept in registers: one trip to memory in 16-byte vectors."""
    tokens, columns = x.shape
    vector = widest_vector(x, weight, out)
    lanes, per_lane = shares(columns * x.dtype.itemsize // vector)
    threads = max(lanes, SMALL_BLOCK) if lanes <= 32 else lanes
    KERNEL(
        -(-tokens * lanes // threads),
        threads,
        *row_arrays(x),
        weight,
        *row_arrays(out),
        tokens,
        columns,
        1 / columns,
        eps,
        macros={
            "ELEMENT": x.dtype,
            "VECTOR": vector,
            "LANES": lanes,
            "PER_LANE": per_lane,
            "THREADS": threads,
        },
    )
