"""Memory for results that a variant has on its way to others.

It is kept for as long as the process lives, since a captured graph may hold its address: one block
a device, stream, thread and purpose, which grows. What a thread queues on a stream is in order, so
it can share the block; a graph that is replayed on another stream than the one it was captured on
must not run beside calls on that one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from sandbox import arrays

_BLOCKS: dict[tuple[int, int, int, str], list[Any]] = {}


def scratch(like: Any, purpose: str, shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """An array of unknown content beside `like`: on a GPU one that other calls use too.

    The calls of one variant name a different purpose for each array that they need at once.
    """
    dtype = np.dtype(dtype)
    if not arrays.is_gpu(like):
        return np.empty(shape, dtype)
    import cupy

    size = math.prod(shape) * dtype.itemsize
    stream, thread = arrays.current_stream_pointer(), threading.get_ident()
    key = (like.data.device_id, stream, thread, purpose)
    blocks = _BLOCKS.setdefault(key, [])
    if not blocks or blocks[-1].nbytes < size:
        grown = 0 if not blocks else 2 * blocks[-1].nbytes
        blocks.append(cupy.empty(max(size, grown, 512), np.uint8))
    return blocks[-1][:size].view(dtype).reshape(shape)
