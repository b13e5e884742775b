"""torch's side of the array bridge; `sandbox.arrays` imports it when a tensor comes in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from sandbox.arrays.adopted import bfloat16, import_cupy
from sandbox.arrays.kinds import REFUSALS, Kind, refusal

_SAME = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
_SAME += ["float16", "float32", "float64", "complex64", "complex128"]

# torch dtype -> (torch dtype to view its bits as, NumPy dtype to view those as)
_DTYPES = {getattr(torch, name): (getattr(torch, name), np.dtype(name)) for name in _SAME}
_DTYPES[torch.bfloat16] = (torch.int16, bfloat16)
_DTYPES |= {
    getattr(torch, name): (torch.uint8, np.dtype(np.uint8))
    for name in dir(torch)
    if name.startswith(("float8_", "float4_"))
}
_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in _SAME}
_TORCH_DTYPES[bfloat16] = torch.bfloat16


def _torch_dtype(dtype: Any) -> torch.dtype:
    dtype = np.dtype(dtype)
    if dtype not in _TORCH_DTYPES:
        raise TypeError(f"torch has no dtype for {dtype}")
    return _TORCH_DTYPES[dtype]


class _StreamHandle:
    """A torch stream in CUDA's stream protocol, which older torch does not speak."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.cuda_stream


class _Unsynchronised:
    """A CUDA tensor's DLPack capsule as it is: `borrow` has made its device and stream current, and
    torch's own protocol would refuse other devices and may make streams wait for each other."""

    def __init__(self, tensor: torch.Tensor, gpu: int) -> None:
        self.tensor = tensor
        self.gpu = gpu

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.gpu

    def __dlpack__(self, **_: Any) -> Any:
        return torch.utils.dlpack.to_dlpack(self.tensor)


class _Writeable:
    """A read-only array's memory without the flag, which older NumPy cannot put into DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


class TorchKind(Kind):
    """torch tensors on the CPU or one CUDA device."""

    library = "torch"

    @classmethod
    def of(cls, value: torch.Tensor, name: str) -> Kind:
        if value.layout is not torch.strided:
            raise TypeError(f"{name}: {value.layout} tensors are not supported, only strided ones")
        if value._is_zerotensor():
            raise TypeError(f"{name}: the tensor has no memory, it is zero; use clone()")
        if value.is_conj() or value.is_neg():
            remedy = "resolve_conj()" if value.is_conj() else "resolve_neg()"
            raise TypeError(f"{name}: the tensor is lazily conjugated or negated; use {remedy}")
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            # Fake, quantized and distributed tensors: their own memory is not their content.
            kind = type(value).__name__
            raise TypeError(f"{name}: a {kind} cannot be shared without a copy")
        if value.is_cuda:
            return cls.on(value.get_device())
        if value.is_cpu:
            return cls.on(None)
        raise TypeError(f"{name}: tensors on {value.device} are not supported, only cpu and cuda")

    def adopt(self, value: torch.Tensor, name: str) -> Any:
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name}: {value.dtype} tensors are not supported")
        bits, dtype = _DTYPES[value.dtype]
        try:
            tensor = value.detach() if value.requires_grad else value
            if bits is not value.dtype:
                tensor = tensor.view(bits)
            if self.gpu is not None:
                array = import_cupy().from_dlpack(_Unsynchronised(tensor, self.gpu))
            else:
                array = np.from_dlpack(tensor)
            return array.view(dtype) if array.dtype != dtype else array
        except REFUSALS as error:
            raise refusal(value, name, error) from error

    def stream(self) -> Any:
        if self.gpu is None:
            return None
        handle = _StreamHandle(torch.cuda.current_stream(self.gpu))
        return import_cupy().cuda.Stream.from_external(handle)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> tuple[Any, torch.Tensor]:
        tensor = torch.empty(shape, dtype=_torch_dtype(dtype), device=self.device)
        return self.adopt(tensor, "result"), tensor

    def export(self, array: Any) -> torch.Tensor:
        """Raises ValueError for negative strides, which torch cannot hold."""
        dtype = _torch_dtype(array.dtype)
        if min(array.strides, default=0) < 0:
            raise ValueError(f"torch has no negative strides, and these are {array.strides}")
        if dtype is torch.bfloat16:
            array = array.view(np.int16)
        if self.gpu is None and not array.flags.writeable:
            array = np.asarray(_Writeable(array))
        return torch.from_dlpack(array).view(dtype)
