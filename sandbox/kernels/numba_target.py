"""The one place that imports Numba's CUDA target.

On a machine with a GPU, kernels compiled by Numba run there; on any other, Numba's simulator runs
them on NumPy arrays. Which of the two is fixed when this module is imported, because Numba reads
`NUMBA_ENABLE_CUDASIM` on its own import; set it beforehand to force the simulator.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import ml_dtypes
import numpy as np

from sandbox import arrays
from sandbox.kernels.cuda.device import no_device_reason

OLDEST_NUMBA_CUDA = (0, 20)

cuda: Any = None
_import_failure: str | None = None

if "NUMBA_ENABLE_CUDASIM" not in os.environ and no_device_reason():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

try:
    import numba_cuda
    from numba import cuda

    if tuple(int(part) for part in numba_cuda.__version__.split(".")[:2]) < OLDEST_NUMBA_CUDA:
        oldest = ".".join(map(str, OLDEST_NUMBA_CUDA))
        _import_failure = f"numba-cuda {numba_cuda.__version__} is older than {oldest}"
except ImportError as failure:
    _import_failure = f"Numba's CUDA target does not import ({failure}): pip install numba-cuda"


def unavailable_reason(target: str) -> str | None:
    """Why Numba kernels cannot run on `target` ("gpu" or "sim") in this process, or None."""
    if _import_failure:
        return _import_failure
    if target == "sim" and not SIMULATED:
        return "this process uses Numba on the GPU; NUMBA_ENABLE_CUDASIM=1 selects the simulator"
    if target == "gpu" and SIMULATED:
        return "this process uses Numba's simulator (NUMBA_ENABLE_CUDASIM=1)"
    return None


def bits(array: Any) -> Any:
    """The array as Numba can take it: bf16 as uint16 codes, everything else as it is."""
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def launch(kernel: Any, grid: Any, block: Any, *arguments: Any) -> None:
    """Launch a Numba kernel on NumPy arrays (simulator) or CuPy arrays (current stream).

    A grid with a zero launches nothing. bf16 arrays arrive in the kernel as uint16 codes.
    """
    extent = grid if isinstance(grid, tuple) else (grid,)
    if 0 in extent:
        return
    wrap = _simulated_array if SIMULATED else _device_array
    prepared = [wrap(bits(a)) if arrays.is_array(a) else a for a in arguments]
    stream = 0 if SIMULATED else cuda.external_stream(arrays.current_stream_pointer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel[grid, block, stream](*prepared)


def _simulated_array(array: Any) -> Any:
    """The simulator's own array over the same memory; left alone it would copy, or refuse views."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(array)


def _device_array(array: Any) -> Any:
    """A Numba view of a CuPy array, made without a synchronisation of either library."""
    description = {
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
        "data": (array.data.ptr, False),
        "version": 2,
    }
    return cuda.from_cuda_array_interface(description, owner=array, sync=False)
