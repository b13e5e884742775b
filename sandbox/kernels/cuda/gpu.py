"""A kernel loaded on one GPU."""

from collections.abc import Mapping

from sandbox.kernels.cuda import nvrtc
from sandbox.kernels.cuda.abi import Argument
from sandbox.kernels.cuda.cubin import kernel_info
from sandbox.kernels.cuda.device import device_info
from sandbox.kernels.cuda.overlap import OverlappingFunction
from sandbox.kernels.cuda.source import KernelSource

_SHARED_WITHOUT_OPT_IN = 48 * 1024


class GpuFunction:
    """`source.entry` compiled for GPU `device` and loaded there."""

    def __init__(
        self,
        source: KernelSource,
        macros: Mapping[str, str],
        arguments: tuple[Argument, ...],
        device: int,
        *,
        min_cc: tuple[int, int],
        arch_specific: bool,
        overlap: bool,
    ):
        import cupy

        info = device_info(device)
        if info.cc < min_cc:
            raise RuntimeError(
                f"{source.entry} needs compute capability {min_cc[0]}.{min_cc[1]}; "
                f"{info.name} has {info.cc[0]}.{info.cc[1]}"
            )
        cubin = nvrtc.compile_cubin(source, macros, nvrtc.device_arch(info.cc, arch_specific))
        sizes = kernel_info(cubin.read_bytes(), source.entry).param_sizes
        _check_sizes(source.entry, arguments, sizes)
        self._entry = source.entry
        self._structs = [(i, sizes[i]) for i, each in enumerate(arguments) if each.size is None]
        self._device, self._current_device = device, cupy.cuda.runtime.getDevice
        self._on_device = cupy.cuda.Device
        with self._on_device(device):
            self._kernel = cupy.RawModule(path=str(cubin)).get_function(source.entry)
            self._function = self._kernel.kernel
            self._overlapping = None
            if overlap and info.cc >= (9, 0):
                self._overlapping = OverlappingFunction(source.entry, self._function.ptr, sizes)
                self._current_stream = cupy.cuda.get_current_stream
            self._max_threads = self._kernel.max_threads_per_block
            static_shared = self._kernel.shared_size_bytes
        self._shared_limit = info.shared_per_block - static_shared
        self._shared_enabled = _SHARED_WITHOUT_OPT_IN - static_shared

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: list,
        shared_bytes: int,
    ) -> None:
        """Queue the kernel on its device's current stream of CuPy; the current device stays.

        `values` are CuPy arrays and NumPy scalars.
        """
        if self._current_device() != self._device:
            with self._on_device(self._device):
                self.launch(grid, block, values, shared_bytes)
            return
        if block[0] * block[1] * block[2] > self._max_threads:
            raise ValueError(
                f"{self._entry}: block {block} has more threads than the {self._max_threads} "
                "that its registers or its __launch_bounds__ allow"
            )
        for index, size in self._structs:
            if values[index].nbytes != size:
                raise TypeError(
                    f"{self._entry}: argument {index} has {values[index].nbytes} bytes, "
                    f"the struct has {size}"
                )
        if shared_bytes > self._shared_enabled:
            self._enable_shared(shared_bytes)
        if self._overlapping is not None:
            stream = self._current_stream().ptr
            self._overlapping.launch(grid, block, values, shared_bytes, stream)
        else:
            self._function(grid, block, values, shared_mem=shared_bytes)

    def _enable_shared(self, shared_bytes: int) -> None:
        if shared_bytes > self._shared_limit:
            raise ValueError(
                f"{self._entry}: shared_bytes {shared_bytes} is more than the "
                f"{self._shared_limit} that this device has for it"
            )
        self._kernel.max_dynamic_shared_size_bytes = shared_bytes
        self._shared_enabled = shared_bytes


def _check_sizes(entry: str, arguments: tuple[Argument, ...], compiled: tuple[int, ...]) -> None:
    """Hold the signature as read against the one compiled: the file may choose among several."""
    read = tuple(each.size or size for each, size in zip(arguments, compiled, strict=False))
    if len(arguments) != len(compiled) or read != compiled:
        raise TypeError(
            f"{entry}: its signature reads as parameters of {[a.size for a in arguments]} bytes, "
            f"but compiled they have {list(compiled)}"
        )
