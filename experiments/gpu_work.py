"""Work for a GPU and clocks for it: copies, fillers, a large GEMM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

from experiments import measure
from sandbox import arrays
from sandbox.kernels.case import normal


class Filler:
    """Work to queue in front of a start event, so that the host is ahead of the GPU by then.

    It is a copy of `BYTES` between two buffers that no contender uses.
    """

    BYTES = 128 << 20

    def __init__(self) -> None:
        self._buffers = cp.full((2, self.BYTES), 0x5A, cp.uint8)
        self._copy()
        self.us = elapsed_us(lambda: [self._copy() for _ in range(10)]) / 10

    def enqueue(self, least_us: float) -> None:
        for _ in range(1 + int(least_us / self.us)):
            self._copy()

    def _copy(self) -> None:
        copy_bytes(self._buffers[1], self._buffers[0])


def copy_bytes(target: Any, source: Any) -> None:
    """Queue a device-to-device copy on the current stream."""
    cp.cuda.runtime.memcpyAsync(
        target.data.ptr,
        source.data.ptr,
        source.nbytes,
        cp.cuda.runtime.memcpyDeviceToDevice,
        cp.cuda.get_current_stream().ptr,
    )


def elapsed_us(enqueue: Callable[[], Any]) -> float:
    """GPU time of the queued work, between two events; waits for it."""
    stream = cp.cuda.get_current_stream()
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record(stream)
    enqueue()
    stop.record(stream)
    stop.synchronize()
    return cp.cuda.get_elapsed_time(start, stop) * 1e3


def host_us(call: Callable[[], Any]) -> float:
    """Host time of a call that only queues work."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def random_bytes(count: int) -> Any:
    """`count` bytes that are not zeros, which move faster."""
    return normal(cp, (count // 4 + 1,), np.dtype(np.float32), 0).view(cp.uint8)[:count]


def gemm_tflops(n: int = 8192, repeats: int = 10) -> float:
    """TFLOP/s of a bf16 `n` x `n` x `n` product of random matrices with float32 sums, by cuBLAS."""
    from cupy.cuda import cublas

    a, b = (normal(cp, (n, n), arrays.bfloat16, seed) for seed in (0, 1))
    c = cp.empty_like(a)
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    bf16, sums, method = (
        cp.cuda.runtime.CUDA_R_16BF,
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )
    handle = cp.cuda.device.get_cublas_handle()
    cublas.setStream(handle, cp.cuda.get_current_stream().ptr)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)

    def product() -> None:
        cublas.gemmEx(
            handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, n, n, one.ctypes.data,
            a.data.ptr, bf16, n, b.data.ptr, bf16, n, zero.ctypes.data,
            c.data.ptr, bf16, n, sums, method,
        )  # fmt: skip

    filler = Filler()
    for _ in range(3):
        product()
    samples = []
    for _ in range(repeats):
        filler.enqueue(50.0)
        samples.append(elapsed_us(product))
    return 2 * n**3 / measure.spread(samples).median / 1e6
