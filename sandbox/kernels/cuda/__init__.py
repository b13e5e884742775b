"""How CUDA C++ gets run: compiled by NVRTC for GPUs, by a C++ compiler for the host runner."""

from sandbox.kernels.cuda.build import Built, prebuild
from sandbox.kernels.cuda.device import DeviceInfo, device_info, no_device_reason
from sandbox.kernels.cuda.host_runner import KernelFault
from sandbox.kernels.cuda.kernel import CudaKernel, Launch, host_options, record_launches
from sandbox.kernels.cuda.nvrtc import ARCHITECTURES, Resources
from sandbox.kernels.cuda.source import CompileError, MissingDependency

__all__ = [
    "ARCHITECTURES",
    "Built",
    "CompileError",
    "CudaKernel",
    "DeviceInfo",
    "KernelFault",
    "Launch",
    "MissingDependency",
    "Resources",
    "device_info",
    "host_options",
    "no_device_reason",
    "prebuild",
    "record_launches",
]
