"""The arrays of a checked launch: which bytes a kernel may touch, and where they lie."""

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

from sandbox.kernels.cuda.source import Param

_MAX_RANK = 8
_GAP = 1 << 20
_PAGE = 4096


class Span(ctypes.Structure):
    """Mirror of `Argument` in host/runtime/worker.h: places `stride` apart, `run` bytes at each."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("low", ctypes.c_void_p),
        ("high", ctypes.c_void_p),
        ("writable", ctypes.c_int),
        ("rank", ctypes.c_int),
        ("extent", ctypes.c_int64 * _MAX_RANK),
        ("stride", ctypes.c_int64 * _MAX_RANK),
        ("run", ctypes.c_int64),
    ]


class GuardedArrays:
    """Copies of a launch's arrays, each with a wide gap before and after it where no access is
    valid, so that one that leaves its array cannot land in another. `arguments` are the caller's
    with the copies in place of the arrays. Arrays that share memory still do, and alignment stays.
    """

    def __init__(self, params: Sequence[Param], arguments: Sequence[object]):
        pairs = [
            (p, a) for p, a in zip(params, arguments, strict=True) if isinstance(a, np.ndarray)
        ]
        bounds = [_bounds(array) for _, array in pairs]
        places, size = _layout(bounds)
        memory = mmap.mmap(-1, size + _GAP)
        base = _address(np.frombuffer(memory, np.uint8))
        for low, high, place in places:
            ctypes.memmove(base + place, low, high - low)
        spans, self._copies, self.arguments = [], [], list(arguments)
        for (param, array), (first, last) in zip(pairs, bounds, strict=True):
            low, place = next((lo, at) for lo, hi, at in places if lo <= first and last <= hi)
            offset = place + _address(array) - low
            copy = np.ndarray(array.shape, array.dtype, memory, offset, array.strides)
            self.arguments = [copy if a is array else a for a in self.arguments]
            if not param.const:
                self._copies.append((array, copy))
            spans.append(_span(param, copy))
        self.spans = (Span * max(1, len(spans)))(*spans)
        self.count = len(spans)

    def copy_back(self) -> None:
        """Give the caller's arrays what the kernel wrote."""
        for array, copy in self._copies:
            np.copyto(array, copy)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The addresses of an array's first byte and of one past its last."""
    low = high = _address(array)
    if array.size == 0:
        return low, high
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    last = high + sum(r for r in reach if r > 0)
    return low + sum(r for r in reach if r < 0), last + array.itemsize


def _layout(bounds: list[tuple[int, int]]) -> tuple[list[tuple[int, int, int]], int]:
    """The stretches of memory that arrays cover, as (low, high, place in the copy), and the copy's
    size. An address keeps its remainder modulo the page size, and with it its alignment."""
    stretches: list[list[int]] = []
    for low, high in sorted(bounds):
        if stretches and low < stretches[-1][1]:
            stretches[-1][1] = max(stretches[-1][1], high)
        else:
            stretches.append([low, high])
    placed, end = [], 0
    for low, high in stretches:
        place = (end + _GAP + _PAGE - 1) // _PAGE * _PAGE + low % _PAGE
        placed.append((low, high, place))
        end = place + high - low
    return placed, end


def _span(param: Param, array: np.ndarray) -> Span:
    low, high = _bounds(array)
    span = Span(param.name.encode(), low, high, writable=not param.const, run=high - low)
    if array.size == 0:
        return span
    run = reach = array.itemsize
    places = []
    pairs = zip(map(abs, array.strides), array.shape, strict=True)
    for stride, extent in sorted((s, n) for s, n in pairs if n > 1 and s):
        if stride < reach:  # the view overlaps itself: its outer bounds are all that is checked
            return span
        if stride == run and not places:
            run *= extent
        else:
            places.insert(0, (extent, stride))
        reach += (extent - 1) * stride
    if len(places) <= _MAX_RANK:
        span.rank, span.run = len(places), run
        for i, (extent, stride) in enumerate(places):
            span.extent[i], span.stride[i] = extent, stride
    return span
