"""Arrays in and out of the ops, without a copy.

Ops work on NumPy arrays (CPU) or CuPy arrays (GPU). A caller may hand in either, or torch tensors
(``nn.Parameter`` too), JAX arrays, or any object that speaks DLPack: `adopt` takes one in, `borrow`
all the arguments of a call, and a `Kind` allocates and returns results as the caller's own library
would. Memory is shared in both directions, and each array keeps the memory under it alive.

Conventions: bf16 is ``ml_dtypes.bfloat16`` in NumPy and CuPy. fp8 and other packed formats are
``uint8`` codes. Where a library cannot carry them, their bits are reinterpreted (``int16`` and
``uint8`` views), never converted.

This package imports neither torch nor CuPy nor JAX until one of their arrays comes in.
"""

from sandbox.arrays.adopted import (
    DTYPES,
    address,
    bfloat16,
    import_cupy,
    is_array,
    is_gpu,
    namespace,
)
from sandbox.arrays.borrowing import Borrowed, adopt, borrow, require_writeable
from sandbox.arrays.kinds import REFUSALS, DLPackKind, Kind, exporter, refusal, to_torch
from sandbox.arrays.scalars import device_scalar
from sandbox.arrays.streams import capturing, current_stream_pointer
from sandbox.arrays.torch_streams import torch_has_cuda, torch_on_current_stream

__all__ = [
    "DTYPES",
    "REFUSALS",
    "Borrowed",
    "DLPackKind",
    "Kind",
    "address",
    "adopt",
    "bfloat16",
    "borrow",
    "capturing",
    "current_stream_pointer",
    "device_scalar",
    "exporter",
    "import_cupy",
    "is_array",
    "is_gpu",
    "namespace",
    "refusal",
    "require_writeable",
    "to_torch",
    "torch_has_cuda",
    "torch_on_current_stream",
]
