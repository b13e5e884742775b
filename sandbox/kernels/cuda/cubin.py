"""What a compiled kernel says about itself in the ELF file that holds it."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attributes of the section `.nv.info.<kernel>`, each a byte for its form, one for its number.
_SIZED_FORM = 0x04
_MAX_THREADS = 0x05
_PARAMETER = 0x17


@dataclass(frozen=True)
class KernelInfo:
    """`launch_bound` is the block size of `__launch_bounds__`, None when the kernel has none;
    `param_sizes` the bytes of each parameter."""

    launch_bound: int | None
    param_sizes: tuple[int, ...]


def kernel_info(cubin: bytes, entry: str) -> KernelInfo:
    """Read it from `cubin`; KeyError when there is no such kernel."""
    bound, sizes = None, {}
    for number, value in _attributes(_section(cubin, f".nv.info.{entry}")):
        if number == _MAX_THREADS:
            x, y, z = struct.unpack("<III", value)
            bound = x * y * z
        elif number == _PARAMETER:
            _, ordinal, _, packed = struct.unpack("<IHHI", value)
            sizes[ordinal] = packed >> 18
    return KernelInfo(bound, tuple(sizes[i] for i in sorted(sizes)))


def _section(elf: bytes, name: str) -> bytes:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name_offset, _, _, _, offset, size in headers:
        start = names + name_offset
        if elf[start : elf.index(b"\0", start)].decode() == name:
            return elf[offset : offset + size]
    raise KeyError(name)


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + 4 <= len(section):
        form, number, size = struct.unpack_from("<BBH", section, position)
        position += 4
        if form == _SIZED_FORM:
            yield number, section[position : position + size]
            position += size
