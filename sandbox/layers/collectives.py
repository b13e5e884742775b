"""What the ranks of context parallelism send each other: three collectives on arrays.

A `Collective` is one rank's end. `Alone` is a world of one rank; the ranks of `InProcess` are
threads of this process, on the CPU, one GPU or several; `torch_collectives.TorchCollective` is a
process among others. They differ in how bytes move and in nothing else: all give the same results.
"""

from __future__ import annotations

import contextvars
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from sandbox import arrays
from sandbox.kernels import require
from sandbox.layers.meetings import Abandoned, Meetings
from sandbox.layers.queues import place_of_caller, queue_of

__all__ = ["Abandoned", "Alone", "Collective", "InProcess"]

Result = TypeVar("Result")

_SUMMED_IN = {
    np.dtype(np.float16): np.dtype(np.float32),
    arrays.bfloat16: np.dtype(np.float32),
    **{np.dtype(name): np.dtype(name) for name in ("float32", "float64", "int32", "int64")},
}


class Collective(ABC):
    """One rank of `world_size`, and what it exchanges with the others.

    All ranks make the same calls in the same order, each with an array of the same shape and dtype.
    Arrays are NumPy's or CuPy's, contiguous, and may be empty; `out` shares no memory with `array`,
    which is only read. On a GPU they live on the current device, and the work is queued on CuPy's
    current stream: what is queued there later may use `out` and overwrite `array`.

    Raises, for each call:
        TypeError, ValueError: an argument is not as said; it is named.

    Attributes:
        rank: from 0 to `world_size - 1`.
        world_size: ranks, any number.
    """

    rank: int
    world_size: int

    def all_gather(self, array: Any, out: Any) -> None:
        """`out[r]` becomes the `array` of rank r.

        Args:
            array: any shape and dtype.
            out: `[world_size, *array.shape]`, the same dtype.
        """
        _require_contiguous(array, "array")
        _require_out(out, (self.world_size, *array.shape), array)
        self._exchange("all_gather", array, out)

    def all_to_all(self, array: Any, out: Any) -> None:
        """`out[r]` becomes what rank r has for this one: its `array[self.rank]`.

        Args:
            array: `[world_size, ...]`, any dtype.
            out: the same shape and dtype.
        """
        self._require_row_a_rank(array)
        _require_out(out, array.shape, array)
        self._exchange("all_to_all", array, out)

    def reduce_scatter(self, array: Any, out: Any) -> None:
        """`out` becomes the sum of what all ranks have for this one: their `array[self.rank]`.

        Rows are added in the order of ranks, and rounded to their dtype once: float16 and bfloat16
        are added in float32, others as they are. A backend's own sum promises neither, so rows are
        exchanged (no more bytes than a ring reduces) and added here. Integers wrap round, floats
        become inf, where a sum is too large.

        Args:
            array: `[world_size, ...]`, float16, bfloat16, float32, float64, int32 or int64.
            out: `array.shape[1:]`, the same dtype.
        """
        self._require_row_a_rank(array)
        if array.dtype not in _SUMMED_IN:
            known = ", ".join(dtype.name for dtype in _SUMMED_IN)
            raise TypeError(f"array is {array.dtype}, expected what can be added: {known}")
        _require_out(out, array.shape[1:], array)
        rows = arrays.namespace(array).empty(array.shape, array.dtype)
        self._exchange("reduce_scatter", array, rows)
        if out.size:
            _add(rows, out)

    @abstractmethod
    def _exchange(self, call: str, array: Any, out: Any) -> None:
        """`out[r]` becomes rank r's `array` if `call` is all_gather, else its `array[rank]`."""

    def _require_row_a_rank(self, array: Any) -> None:
        _require_contiguous(array, "array")
        if array.shape[:1] != (self.world_size,):
            raise ValueError(
                f"array has shape {tuple(array.shape)}, expected {self.world_size} on axis 0: "
                "a row a rank"
            )


class Alone(Collective):
    """A world of one rank: it gets what it gave."""

    rank = 0
    world_size = 1

    def _exchange(self, call: str, array: Any, out: Any) -> None:
        queue_of(array).copy(array.reshape(out.shape), out)


class InProcess:
    """A world whose ranks are threads of this process.

    Args:
        world_size: ranks, any number.

    Raises:
        TypeError, ValueError: it is no integer, or below 1.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = require.integer(world_size, "world_size", least=1)
        self._meetings = Meetings(self.world_size)

    def rank(self, rank: int) -> Collective:
        """The end of one rank, for a thread of the caller's own.

        A thread that dies leaves the others waiting, as nobody knows; `run` has no such trouble.
        """
        if require.integer(rank, "rank") >= self.world_size:
            raise ValueError(f"rank is {rank}, expected 0 to {self.world_size - 1}")
        return _Rank(self._meetings, rank)

    def run(self, function: Callable[[Collective], Result]) -> list[Result]:
        """Calls `function` once for each rank, each in a thread of its own; results by rank.

        A thread has the caller's context variables, and begins on the caller's GPU and CuPy stream;
        it may make another device or stream current for itself.

        Raises:
            Exception: what a rank raised, the first one. The others get `Abandoned` where they
                wait for it, also where it returned without the call that they wait in.
            ValueError: the ranks made different calls, or with other shapes, dtypes or devices.
        """
        meetings = Meetings(self.world_size)
        begin = place_of_caller()
        results: dict[int, Result] = {}

        def work(rank: int) -> None:
            try:
                begin()
                results[rank] = function(_Rank(meetings, rank))
            except BaseException as error:
                meetings.leave(rank, error)
            else:
                meetings.leave(rank, None)

        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(work, rank),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if (error := meetings.first_error()) is not None:
            raise error
        return [results[rank] for rank in range(self.world_size)]


class _Rank(Collective):
    """One rank of `InProcess`: it takes what it needs from the arrays of the others."""

    def __init__(self, meetings: Meetings, rank: int) -> None:
        self.rank = rank
        self.world_size = meetings.world_size
        self._meet = meetings.meet

    def _exchange(self, call: str, array: Any, out: Any) -> None:
        queue = queue_of(array)
        place = "GPUs" if arrays.is_gpu(array) else "the CPU"
        what = f"{call} of {array.dtype} {tuple(array.shape)} on {place}"
        # Nobody reads an array before its rank has written it, ...
        given = self._meet(self.rank, what, (array, queue.mark()))
        for rank, (theirs, written) in enumerate(given):
            queue.wait(written)
            part = theirs if call == "all_gather" else theirs[self.rank, ...]
            queue.copy(part, out[rank, ...])
        # ... and nobody goes on, maybe to overwrite its own, before all have read it.
        for read in self._meet(self.rank, f"the end of {what}", queue.mark()):
            queue.wait(read)


def _add(rows: Any, out: Any) -> None:
    """`out` = the sum of `rows` `[world_size, *out.shape]`, from the first on; may change them."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = rows.astype(_SUMMED_IN[rows.dtype], copy=False)
        total = wide[0]
        for row in wide[1:]:
            total += row
        out[...] = total.astype(out.dtype)


def _require_contiguous(value: Any, name: str) -> None:
    if not arrays.is_array(value):
        raise TypeError(f"{name} is {type(value).__name__}, expected a NumPy or CuPy array")
    if not value.flags.c_contiguous:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and strides {value.strides}, "
            "expected a contiguous array"
        )


def _require_out(out: Any, shape: tuple[int, ...], array: Any) -> None:
    _require_contiguous(out, "out")
    here, there = arrays.exporter(array, "array"), arrays.exporter(out, "out")
    if here is not there:
        raise ValueError(f"mixed devices: array is on {here.device}, out is on {there.device}")
    if out.shape != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}, expected {tuple(shape)}")
    require.same_dtype(out, "out", array, "array")
    arrays.require_writeable(out, "out")
    require.apart({"out": out}, {"array": array})
