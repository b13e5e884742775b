"""Numbers where a kernel can read them."""

from __future__ import annotations

import functools
import numbers
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.arrays.adopted import import_cupy, is_gpu, type_name
from sandbox.arrays.borrowing import adopt
from sandbox.arrays.kinds import kind_finder


def device_scalar(value: Any, xp: ModuleType, dtype: Any = np.float32, name: str = "scale") -> Any:
    """A number as a contiguous array of shape ``(1,)`` in `xp`, where a kernel can read it.

    `value` is a Python or NumPy number, or an array of any kind with one element. It is not copied
    if it already is an array of that dtype on that device. A number for a GPU is uploaded once for
    each value and kept, as a captured graph may hold its address: use it once before the capture.

    Raises TypeError for what is not a real number, ValueError if an array has not exactly one
    element, lives on another device, or `dtype` cannot hold the value.
    """
    dtype = np.dtype(dtype)
    if kind_finder(type(value)) is not None:
        array = adopt(value, name)
        if array.size != 1:
            raise ValueError(f"{name}: expected one element, got shape {array.shape}")
        if array.dtype.kind in "ub":  # codes of an 8-bit float, too, arrive as uint8
            raise TypeError(f"{name}: expected a number of 16 bits or more, got {array.dtype}")
        if is_gpu(array):
            gpu = array.data.device_id
            if xp is np or gpu != xp.cuda.runtime.getDevice():
                raise ValueError(f"mixed devices: {name} is on cuda:{gpu}, the call is not")
            return array.reshape(1).astype(dtype, copy=False)
        if xp is np and array.dtype == dtype:
            return array.reshape(1)
        value = array.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real | ml_dtypes.bfloat16):
        raise TypeError(f"{name}: expected a number or an array of one, got {type_name(value)}")
    try:
        with np.errstate(over="raise"):
            number = np.array([value], dtype)
    except (OverflowError, FloatingPointError):
        raise ValueError(f"{name}: {value} is too large for {dtype}") from None
    return number if xp is np else _uploaded(number.tobytes(), dtype, xp.cuda.runtime.getDevice())


@functools.cache
def _uploaded(bits: bytes, dtype: np.dtype, gpu: int) -> Any:
    cupy = import_cupy()
    array = cupy.asarray(np.frombuffer(bits, dtype))
    cupy.cuda.get_current_stream().synchronize()
    return array
