"""Conformance vectors through one variant, or one function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats.mismatch import Mismatch, compare_stored, compare_values
from sandbox.cache_formats.vectors import Vectors, load
from sandbox.kernels import OPS, Unavailable
from sandbox.kernels.failures import described

BLOCK_SIZE = 16
SENTINEL = 0xA5
"""Every byte of a cache before rows are written to it."""
SIM_VALUES = 640
"""Values of one set of vectors that the simulator, which is slow, is given at most."""


@dataclass(frozen=True)
class Verdict:
    """What became of one set of vectors."""

    status: str
    message: str = ""
    mismatch: dict[str, Any] = field(default_factory=dict)


def sample(vectors: Vectors, target: str) -> Vectors:
    """What a target is given: all rows, or in the simulator a few from all over."""
    count, width = vectors.values.shape
    few = min(count, max(1, SIM_VALUES // width)) if target == "sim" else count
    return vectors.take((2 * np.arange(few) + 1) * count // (2 * few))


def check_variant(
    stage: Callable[[str], None], op: str, variant: str, target: str, label: str
) -> dict[str, Any]:
    """The verdict on a variant for the set of vectors of that label; a task of the worker."""
    stage(label)
    xp = arrays.import_cupy() if target == "gpu" else np
    (vectors,) = (each for each in load() if each.label == label)
    call, writes = CALLS[op]
    return asdict(judge(sample(vectors, target), writes, lambda some: call(some, variant, xp)))


def judge(vectors: Vectors, writer: bool, call: Callable[[Vectors], Any]) -> Verdict:
    """What `call` gives for the vectors, beside what it should give."""
    try:
        with np.errstate(all="ignore"):
            got = call(vectors)
    except Unavailable as reason:
        return Verdict("UNAVAILABLE", str(reason).partition(": ")[2])
    except NotImplementedError as reason:
        return Verdict("UNAVAILABLE", str(reason) or "it raised NotImplementedError")
    except (Exception, SystemExit) as failure:
        return Verdict("ERROR", described(failure))
    wrong: Mismatch | None = (compare_stored if writer else compare_values)(vectors, got)
    return Verdict("WRONG", str(wrong), asdict(wrong)) if wrong else Verdict("PASSED")


def insert(vectors: Vectors, variant: str, xp: Any) -> Any:
    """The bytes that a variant of concat_insert leaves in the slots of the rows."""
    fmt, rows = vectors.format, xp.asarray(vectors.rows)
    num_blocks = len(rows) // BLOCK_SIZE + 1
    row_bytes = vectors.stored.shape[1]
    codes = xp.full((num_blocks, BLOCK_SIZE, row_bytes), SENTINEL, dtype=np.uint8)
    slots = xp.arange(num_blocks * BLOCK_SIZE)[::-1][: len(rows)].copy()
    OPS["concat_insert"](
        rows[:, : vectors.L],
        rows[:, vectors.L :] if vectors.R else None,
        codes.view(fmt.storage),
        slots,
        cache_format=fmt.name,
        k_scale=vectors.k_scale,
        tile_scale=vectors.tile_scale,
        variant=variant,
        check_values=False,
    )
    return on_cpu(codes.reshape(-1, row_bytes)[slots])


def gather(vectors: Vectors, variant: str, xp: Any) -> Any:
    """The values that a variant of gather has for the stored rows, in float32 if they are codes."""
    fmt, count = vectors.format, len(vectors.stored)
    num_blocks = -(-count // BLOCK_SIZE)
    codes = xp.full((num_blocks * BLOCK_SIZE, vectors.stored.shape[1]), SENTINEL, dtype=np.uint8)
    codes[:count] = xp.asarray(vectors.stored)
    blocks = codes.view(fmt.storage).reshape(num_blocks, BLOCK_SIZE, -1)
    restore = {"kv_lora_rank": vectors.L, "out_dtype": "float32"} if fmt.packed else {}
    values = OPS["gather"](
        blocks[::-1].copy(),
        xp.arange(num_blocks, dtype=np.int32)[::-1].copy()[None],
        xp.asarray([0, count], dtype=np.int32),
        num_tokens=count,
        cache_format=fmt.name,
        k_scale=vectors.k_scale,
        variant=variant,
        check_values=False,
        **restore,
    )
    return on_cpu(values)


def dequantize(vectors: Vectors, variant: str, xp: Any) -> Any:
    """The float32 values that a variant of dequantize_context has for the stored rows."""
    values = OPS["dequantize_context"](
        xp.asarray(vectors.stored),
        cache_format=vectors.cache_format,
        k_scale=vectors.k_scale,
        kv_lora_rank=vectors.L,
        out_dtype="float32",
        variant=variant,
        check_values=False,
    )
    return on_cpu(values)


CALLS = {
    "concat_insert": (insert, True),
    "gather": (gather, False),
    "dequantize_context": (dequantize, False),
}
"""How each op is called, and whether it writes rows."""


def on_cpu(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()
