"""The memory of a step's intermediate arrays, kept from step to step."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from sandbox import arrays

SLACK = 512
"""Bytes behind every array: a GEMM may read, and not use, what follows the view it is given."""


class Workspace:
    """Arrays by name, of the caller's own allocator, each as large as a step ever asked for.

    Layers that run one after the other on one stream share a workspace; ranks in threads have one
    each. Once a step of the largest size has run, no other allocates. A block that a CUDA graph was
    captured with is kept, also when a larger one takes its name.

    Attributes:
        allocations: how often memory was asked for.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[arrays.Kind, str], Any] = {}
        self._in_graphs: dict[int, Any] = {}
        self._side_streams: dict[int, Any] = {}
        self._in_use = threading.Lock()
        self.allocations = 0

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For the time of a layer's call.

        Raises:
            RuntimeError: another call uses it now.
        """
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "the workspace is in use by another call: threads need layers with a workspace each"
            )
        try:
            yield
        finally:
            self._in_use.release()

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take now."""
        blocks = {id(block): block for block in (*self._blocks.values(), *self._in_graphs.values())}
        return sum(block[0].nbytes for block in blocks.values())

    def take(self, kind: arrays.Kind, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """The array `name`, contiguous, of unknown content; it is the same memory at every call.

        Raises:
            RuntimeError: it would have to grow while a CUDA graph is captured.
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        block = self._blocks.get((kind, name))
        in_graph = arrays.capturing(kind)
        if block is None or block[0].nbytes < size + SLACK:
            if in_graph:
                raise RuntimeError(
                    f"workspace array {name!r} would grow to {size} bytes while a CUDA graph is "
                    "captured: run a step of this size once before"
                )
            self._blocks.pop((kind, name), None)
            block = None  # its memory may serve the new one
            block = kind.empty(-(-(size + SLACK) // SLACK) * SLACK, np.uint8)
            self._blocks[kind, name] = block
            self.allocations += 1
        if in_graph:
            self._in_graphs[id(block)] = block
        return block[0][:size].view(dtype).reshape(shape)

    def side_stream(self, gpu: int) -> Any:
        """A stream beside the caller's on this GPU, as a CuPy stream."""
        if gpu not in self._side_streams:
            self._side_streams[gpu] = arrays.import_cupy().cuda.Stream(non_blocking=True)
        return self._side_streams[gpu]
