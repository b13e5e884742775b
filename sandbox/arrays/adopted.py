"""Adopted arrays, NumPy's on the CPU and CuPy's on a GPU: their dtypes, namespace and addresses."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": bfloat16,
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


def import_cupy() -> ModuleType:
    """CuPy. Raises ImportError, saying what needs it, where it does not import."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"arrays on a GPU need CuPy, which does not import: {error}") from error
    return cupy


def type_name(value: Any) -> str:
    """The class of `value` as messages name it."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def namespace(*arrays: Any) -> ModuleType:
    """``numpy`` or ``cupy``: the namespace of adopted arrays.

    Raises TypeError if there is none, if they mix the two, or if one is not adopted yet.
    """
    cupy = sys.modules.get("cupy")
    found: dict[ModuleType, int] = {}
    for position, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            found.setdefault(np, position)
        elif cupy is not None and isinstance(array, cupy.ndarray):
            found.setdefault(cupy, position)
        else:
            raise TypeError(
                f"array {position} is {type_name(array)}, expected an adopted NumPy or CuPy array"
            )
    if len(found) != 1:
        mix = " and ".join(f"{xp.__name__} (array {position})" for xp, position in found.items())
        raise TypeError(f"mixed namespaces: {mix}" if mix else "expected at least one array")
    return next(iter(found))


def is_gpu(array: Any) -> bool:
    """Whether an adopted array lives on a GPU."""
    return namespace(array) is not np


def is_array(value: Any) -> bool:
    """Whether `value` is an adopted array; NumPy's scalars, which look like arrays, are not."""
    cupy = sys.modules.get("cupy")
    return isinstance(value, np.ndarray) or (cupy is not None and isinstance(value, cupy.ndarray))


def address(array: Any) -> int:
    """Address of the first element of an adopted array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
