"""The border between Python values and a kernel's C parameters."""

import ctypes
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sandbox.kernels.cuda.source import Param

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)

_C_NAMES = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.float16): "__half",
    _BFLOAT16: "__nv_bfloat16",
    _E4M3: "__nv_fp8_e4m3",
    _E5M2: "__nv_fp8_e5m2",
    np.dtype(np.bool_): "bool",
    np.dtype(np.int8): "signed char",
    np.dtype(np.uint8): "unsigned char",
    np.dtype(np.int16): "short",
    np.dtype(np.uint16): "unsigned short",
    np.dtype(np.int32): "int",
    np.dtype(np.uint32): "unsigned int",
    np.dtype(np.int64): "long long",
    np.dtype(np.uint64): "unsigned long long",
}

_SCALARS = {
    "bool": (np.bool_, ctypes.c_bool),
    "float": (np.float32, ctypes.c_float),
    "double": (np.float64, ctypes.c_double),
    "int8": (np.int8, ctypes.c_int8),
    "uint8": (np.uint8, ctypes.c_uint8),
    "int16": (np.int16, ctypes.c_int16),
    "uint16": (np.uint16, ctypes.c_uint16),
    "int32": (np.int32, ctypes.c_int32),
    "uint32": (np.uint32, ctypes.c_uint32),
    "int64": (np.int64, ctypes.c_int64),
    "uint64": (np.uint64, ctypes.c_uint64),
}

_BITS_16 = (np.dtype(np.uint16), np.dtype(np.int16))
_BITS_8 = (np.dtype(np.uint8), np.dtype(np.int8))
_ELEMENTS = {
    "float": (np.dtype(np.float32),),
    "double": (np.dtype(np.float64),),
    "half": (np.dtype(np.float16), *_BITS_16),
    "bfloat16": (_BFLOAT16, *_BITS_16),
    "fp8_e4m3": (_E4M3, *_BITS_8),
    "fp8_e5m2": (_E5M2, *_BITS_8),
    "bool": (np.dtype(np.bool_), np.dtype(np.uint8)),
    "int8": _BITS_8,
    # Raw bytes and raw 16-bit words: kernels that handle floating-point bits themselves.
    "uint8": (*_BITS_8, _E4M3, _E5M2, np.dtype(np.bool_)),
    "int16": _BITS_16[::-1],
    "uint16": (*_BITS_16, _BFLOAT16, np.dtype(np.float16)),
    "int32": (np.dtype(np.int32),),
    "uint32": (np.dtype(np.uint32),),
    "int64": (np.dtype(np.int64),),
    "uint64": (np.dtype(np.uint64),),
}

MacroValue = int | bool | float | str | np.dtype | type


def macro_text(name: str, value: MacroValue) -> str:
    """The C text of a macro's value: a dtype becomes its C type, a float a `float` literal."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(f"macro {name!r} is not a C identifier")
    if isinstance(value, str):
        if "\n" in value:
            raise ValueError(f"macro {name}: the text {value!r} has more than one line")
        return value
    if isinstance(value, (bool, np.bool_, int, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        if not math.isfinite(value):
            raise ValueError(f"macro {name}: {value} has no C literal")
        return f"{float(value)!r}f"
    if isinstance(value, (np.dtype, type)):
        if text := _C_NAMES.get(np.dtype(value)):
            return text
        raise TypeError(f"macro {name}: dtype {np.dtype(value)} has no C type here")
    raise TypeError(f"macro {name}: expected int, bool, float, str or dtype, got {value!r}")


def canonical(ctype: str, macros: Mapping[str, str]) -> str:
    """`ctype` with its macros expanded, as one of the names of the tables here, else as it is."""
    for _ in range(8):  # a macro may name another
        expanded = re.sub(r"[A-Za-z_]\w*", lambda match: macros.get(match[0], match[0]), ctype)
        if expanded == ctype:
            break
        ctype = expanded
    plain = " ".join(ctype.split()).removeprefix("std::")
    if match := re.fullmatch(r"(u?int(?:8|16|32|64))_t", plain):
        return match[1]
    if match := re.fullmatch(r"(?:__)?(?:nv_)?(half|bfloat16|fp8_e4m3|fp8_e5m2)", plain):
        return match[1]
    aliases = {"size_t": "uint64", "ptrdiff_t": "int64", "__nv_fp8_storage_t": "uint8"}
    return aliases.get(plain) or _built_in_integer(plain.split()) or plain


def _built_in_integer(words: list[str]) -> str | None:
    if not words or not set(words) <= {"signed", "unsigned", "char", "short", "int", "long"}:
        return None
    if words == ["char"]:  # as an element it stands for bytes of anything
        return "char"
    width = 8 if "char" in words else 16 if "short" in words else 64 if "long" in words else 32
    return f"{'u' if 'unsigned' in words else ''}int{width}"


@dataclass(frozen=True)
class Argument:
    """How one parameter is filled.

    `dtypes` are those a pointer takes, None for any. `host` turns a Python number into a ctypes
    scalar and a struct into bytes, `gpu` both into NumPy scalars; they raise ValueError or
    TypeError that names the parameter. `size` is the parameter's bytes, None when only C knows.
    """

    param: Param
    pointer: bool
    dtypes: tuple[np.dtype, ...] | None
    host: Callable[[object], object]
    gpu: Callable[[object], object]
    size: int | None


def argument(param: Param, macros: Mapping[str, str]) -> Argument:
    """How to fill `param` of a kernel specialised by `macros`."""
    kind = canonical(param.ctype, macros)
    if param.pointer:
        null = np.uint64(0)
        return Argument(
            param,
            True,
            _ELEMENTS.get(kind),
            host=lambda array: array,
            gpu=lambda array: null if array is None else array,
            size=8,
        )
    kind = "int8" if kind == "char" else kind
    if kind not in _SCALARS:
        as_bytes, as_record = _struct(param, bytes), _struct(param, np.void)
        return Argument(param, False, None, as_bytes, as_record, size=None)
    on_gpu, on_host = _SCALARS[kind]
    make = _real if kind in ("float", "double") else _integer
    size = ctypes.sizeof(on_host)
    host, gpu = make(param, kind, on_host), make(param, kind, on_gpu)
    return Argument(param, False, None, host, gpu, size)


def place(arguments: tuple[Argument, ...], values: tuple[object, ...]) -> int | None:
    """The GPU that the arrays among `values` lie on, None for the host; TypeError for a mix, a
    wrong number of values, or an array of a dtype that its pointer does not take."""
    if len(values) != len(arguments):
        names = ", ".join(each.param.name for each in arguments)
        raise TypeError(f"expected {len(arguments)} arguments ({names}), got {len(values)}")
    cupy = sys.modules.get("cupy")
    on_gpu = np.ndarray if cupy is None else cupy.ndarray
    found: dict[int | None, str] = {}
    for each, value in zip(arguments, values):
        if not each.pointer or value is None:
            continue
        if isinstance(value, np.ndarray):
            found[None] = each.param.name
            if not (each.param.const or value.flags.writeable):
                raise ValueError(f"{each.param.name}: read-only array, but the kernel writes it")
        elif isinstance(value, on_gpu):
            found[value.data.device_id] = each.param.name
        else:
            raise _wrong_type(each.param, "an array or None", value)
        if each.dtypes is not None and value.dtype not in each.dtypes:
            taken = " or ".join(map(str, each.dtypes))
            raise TypeError(
                f"{each.param.name} ({each.param.ctype}*): expected {taken}, got {value.dtype}"
            )
    if len(found) > 1:
        places = (f"{n} on {'the host' if d is None else f'GPU {d}'}" for d, n in found.items())
        raise TypeError(f"arrays in different places: {', '.join(places)}")
    return next(iter(found), None)


def _integer(param: Param, kind: str, make: Callable[[int], object]) -> Callable[[object], object]:
    low, high = 0, 1
    if kind != "bool":
        limits = np.iinfo(kind)
        low, high = int(limits.min), int(limits.max)

    def convert(value: object) -> object:
        if type(value) is not int:
            if not isinstance(value, (int, np.integer, np.bool_)):
                raise _wrong_type(param, "an integer", value)
            value = int(value)
        if not low <= value <= high:
            raise ValueError(f"{param.name}: {value} does not fit {param.ctype} ({low} to {high})")
        return make(value)

    return convert


def _real(param: Param, kind: str, make: Callable[[float], object]) -> Callable[[object], object]:
    largest = float(np.finfo({"float": np.float32, "double": np.float64}[kind]).max)

    def convert(value: object) -> object:
        if type(value) is not float:
            if not isinstance(value, (int, float, np.integer, np.floating, ml_dtypes.bfloat16)):
                raise _wrong_type(param, "a number", value)
            value = float(value)
        if largest < abs(value) < math.inf:
            raise ValueError(f"{param.name}: {value} does not fit {param.ctype} (up to {largest})")
        return make(value)

    return convert


def _struct(param: Param, make: Callable[[bytes], object]) -> Callable[[object], object]:
    def convert(value: object) -> object:
        if not isinstance(value, (bytes, np.generic, ctypes.Structure)):
            raise _wrong_type(param, "bytes or a NumPy record", value)
        return make(value.tobytes() if isinstance(value, np.generic) else bytes(value))

    return convert


def _wrong_type(param: Param, expected: str, value: object) -> TypeError:
    return TypeError(f"{param.name} ({param.ctype}): expected {expected}, got {value!r:.80}")
