"""Checks that one rank makes of its collective, wherever the others are: threads or processes.

Every rank knows what all ranks give, as their arrays are made from a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sandbox.arrays import DTYPES
from sandbox.kernels.cuda.device import no_device_reason
from sandbox.layers.collectives import Collective

SHAPES = [(), (1,), (3, 5), (2, 3, 7), (0, 5), (4, 0)]
POISON = 0xA5


def gpu_count() -> int:
    if no_device_reason():
        return 0
    import cupy

    return cupy.cuda.runtime.getDeviceCount()


def given(rank: int, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """What `rank` gives: floats of many magnitudes, integers of all bits."""
    rng = np.random.default_rng([seed, rank])
    if np.dtype(DTYPES[dtype]).kind in "iu":
        size = (*shape, DTYPES[dtype].itemsize)
        return rng.integers(256, size=size, dtype=np.uint8).view(DTYPES[dtype]).reshape(shape)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return np.asarray(values).astype(DTYPES[dtype])


def poisoned(shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    size = int(np.prod(shape)) * DTYPES[dtype].itemsize
    return xp.full(size, POISON, np.uint8).view(DTYPES[dtype]).reshape(shape)


def on_cpu(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def assert_same_bytes(got: Any, want: np.ndarray) -> None:
    got = on_cpu(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert got.tobytes() == want.tobytes()


def check_all_gather(collective: Collective, shape, dtype, seed=0, xp=np) -> Any:
    ranks = range(collective.world_size)
    everyones = [given(rank, shape, dtype, seed) for rank in ranks]
    array = xp.asarray(everyones[collective.rank])
    out = poisoned((len(ranks), *shape), dtype, xp)
    collective.all_gather(array, out)
    assert_same_bytes(out, np.stack(everyones))
    assert_same_bytes(array, everyones[collective.rank])
    return out


def check_all_to_all(collective: Collective, shape, dtype, seed=0, xp=np) -> Any:
    ranks = range(collective.world_size)
    everyones = [given(rank, (len(ranks), *shape), dtype, seed) for rank in ranks]
    array = xp.asarray(everyones[collective.rank])
    out = poisoned(array.shape, dtype, xp)
    collective.all_to_all(array, out)
    assert_same_bytes(out, np.stack(everyones)[:, collective.rank])
    assert_same_bytes(array, everyones[collective.rank])
    return out


def check_reduce_scatter(collective: Collective, shape, dtype, seed=0, xp=np) -> Any:
    ranks = range(collective.world_size)
    everyones = [given(rank, (len(ranks), *shape), dtype, seed) for rank in ranks]
    array = xp.asarray(everyones[collective.rank])
    out = poisoned(shape, dtype, xp)
    collective.reduce_scatter(array, out)
    assert_same_bytes(array, everyones[collective.rank])
    rows = np.stack(everyones)[:, collective.rank]
    if rows.dtype.kind == "i":
        assert_same_bytes(out, np.asarray(rows.astype(np.int64).sum(axis=0)).astype(rows.dtype))
        return out
    total = rows[0].astype(np.float32)
    for row in rows[1:]:
        total = total + row.astype(np.float32)
    assert_same_bytes(out, np.asarray(total).astype(rows.dtype))
    exact, magnitude = rows.astype(np.float64).sum(axis=0), np.abs(rows.astype(np.float64)).sum(0)
    half_ulp = {"float32": 0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    bound = half_ulp * np.abs(exact) + len(ranks) * 2.0**-23 * magnitude + 2.0**-24
    assert (np.abs(on_cpu(out).astype(np.float64) - exact) <= bound).all()
    return out


CHECKS: dict[str, Callable[..., Any]] = {
    "all_gather": check_all_gather,
    "all_to_all": check_all_to_all,
    "reduce_scatter": check_reduce_scatter,
}
CALLS = [
    (name, dtype)
    for name in CHECKS
    for dtype in ("float32", "float16", "bfloat16", "uint8", "int32")
    if (name, dtype) != ("reduce_scatter", "uint8")
]


def check_all(collective: Collective, xp: Any = np) -> list[bytes]:
    """Every collective in every dtype and shape; the results' bytes, for one world and another."""
    results = []
    for seed, (name, dtype) in enumerate(CALLS):
        for shape in SHAPES:
            results.append(on_cpu(CHECKS[name](collective, shape, dtype, seed, xp)).tobytes())
    return results


def check_later_work(collective: Collective, xp: Any = np) -> None:
    """What is queued after a call overwrites its input, and no rank waits on the CPU; on GPUs one
    rank's stream after the other is late."""
    mine = xp.empty(1 << 16, np.float32)
    outs = [xp.empty((collective.world_size, len(mine)), np.float32) for _ in range(8)]
    slow = xp.ones(1 << (10 if xp is np else 24), np.float32)
    for step, out in enumerate(outs):
        if collective.rank == step % collective.world_size:
            for _ in range(30):
                slow *= 1
        mine[...] = 100 * step + collective.rank
        collective.all_gather(mine, out)
        mine[...] = -1
    for step, out in enumerate(outs):
        for rank in range(collective.world_size):
            assert bool((out[rank] == 100 * step + rank).all()), (step, rank)
