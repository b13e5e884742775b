"""JAX's side of the array bridge; `sandbox.arrays` imports it when a JAX array comes in."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from sandbox.arrays.kinds import REFUSALS, DLPackKind, Kind, refusal

_ALIGNMENT = 64  # bytes; JAX copies a NumPy buffer that is aligned less


class JaxKind(DLPackKind):
    """JAX arrays on the CPU or one CUDA device."""

    library = "JAX"
    # JAX may give an input's memory to work on its own streams as soon as the caller drops it.
    waits_on_exit = True

    @classmethod
    def of(cls, value: jax.Array, name: str) -> Kind:
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name}: a JAX tracer has no memory; call ops outside jax.jit")
        if value.is_deleted():
            raise TypeError(f"{name}: this JAX array is deleted or donated")
        return super().of(value, name)

    def adopt(self, value: jax.Array, name: str) -> Any:
        if self.gpu is not None:
            return super().adopt(value, name)
        try:
            # NumPy's DLPack has no bf16 and a view in JAX is a copy; the array protocol has both.
            array = np.asarray(value, copy=False)
            if array.ctypes.data != value.unsafe_buffer_pointer():
                raise BufferError("JAX made one")
        except REFUSALS as error:
            raise refusal(value, name, error) from error
        return array.view(np.uint8) if array.dtype.name.startswith("float8") else array

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        if self.gpu is not None:
            return super().empty(shape, dtype)
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        buffer = memory[start : start + nbytes].view(dtype).reshape(shape)
        return buffer, buffer

    def export(self, array: Any) -> jax.Array:
        """Shares the memory if it is compact and 64-byte aligned, as that of `empty` is."""
        if self.gpu is None:
            result = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
        else:
            result = jax.dlpack.from_dlpack(array)
        if result.dtype != array.dtype:
            raise TypeError(f"JAX makes {result.dtype} of {array.dtype}: set jax_enable_x64")
        return result

    def finish(self, adopted: Any, result: Any) -> jax.Array:
        return self.export(adopted)
