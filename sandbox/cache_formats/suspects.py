"""Known mistakes of writers and readers, recognised by what they make of one row.

Each is said in words that go on from "it".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.cache_formats import FORMATS
from sandbox.cache_formats.ds_mla import power_of_two_not_below
from sandbox.cache_formats.format import Field
from sandbox.cache_formats.fp8 import E4M3, E5M2
from sandbox.cache_formats.vectors import Vectors

OTHER_FLOAT8 = {"fp8_e4m3": "fp8_e5m2", "fp8_e5m2": "fp8_e4m3"}
KINDS = {kind.dtype: kind for kind in (E4M3, E5M2)}
SIGN_AND_EXPONENT = np.uint32(0xFF80_0000)


def of_writer(one: Vectors, got: Any) -> str:
    """The mistake that gives the bytes `got` for the only row of `one`, or nothing."""
    right = one.stored[0]
    with np.errstate(all="ignore"):
        for words, stored, fields in _wrong_writers(one) if one.format.packed else ():
            parts = [slice(field.offset, field.offset + field.nbytes) for field in fields]
            wrong, mine, should = (
                np.concatenate([row[part] for part in parts]) for row in (stored[0], got, right)
            )
            if (wrong == mine).all() and (wrong != should).any():
                return words
    return ""


def of_reader(one: Vectors, got: Any) -> str:
    """The mistake that gives the values `got` for the only row of `one`, or nothing."""
    with np.errstate(all="ignore"):
        should = one.values[0].astype(got.dtype)
        for words, values in _wrong_readers(one):
            wrong = values[0].astype(got.dtype)
            if _same(wrong, got) and not _same(wrong, should):
                return words
    return ""


def _same(left: Any, right: Any) -> bool:
    return np.array_equal(left, right, equal_nan=True)


def elements(stored: Any, field: Field) -> Any:
    """One field of rows of bytes, in its own dtype."""
    part = stored[:, field.offset : field.offset + field.nbytes]
    return np.ascontiguousarray(part).view(field.dtype)


def _wrong_writers(one: Vectors) -> Iterator[tuple[str, Any, tuple[Field, ...]]]:
    """Words, the bytes of a wrong writer, and the fields by which one knows it."""
    fmt, dims, rows = one.format, one.widths, one.rows.astype(np.float32)
    fields = fmt.layout(dims)
    for rule in fmt.tile_scales:
        if rule != one.tile_scale:
            other = fmt.encode(rows, dims, tile_scale=rule)
            yield f"follows tile_scale {rule!r}", other, fields
    if scales := tuple(field for field in fields if "scale" in field.name):
        positive = fmt.encode(np.maximum(rows, 0), dims, tile_scale=one.tile_scale)
        yield "takes the largest value without abs", positive, scales
    if fmt.name == "int4_per_token":
        yield "puts the values of even columns in high nibbles", _swapped_nibbles(one), fields
    if fmt.needs_scale:
        scale = np.float32(one.k_scale)
        for words, scaled in (
            ("multiplies by k_scale", rows * scale),
            ("multiplies by the reciprocal of k_scale", rows * (np.float32(1) / scale)),
            ("ignores k_scale", rows),
        ):
            yield words, fmt.encode(scaled, dims, k_scale=1), fields
        cast = (rows / scale).astype(fields[0].dtype)
        yield "does not saturate", cast.view(np.uint8), fields
        signed = one.stored | np.where(
            np.isnan(rows) & np.signbit(rows), np.uint8(0x80), np.uint8(0)
        )
        yield "keeps the sign of a NaN, whose code is 7f", signed, fields
    if fields[0].dtype in KINDS:
        kind, codes = KINDS[fields[0].dtype], elements(one.stored, fields[0])
        for words, number in (("largest", kind.largest), ("least", -kind.largest)):
            wrong = np.where(np.isnan(codes), kind.dtype.type(number), codes)
            yield f"makes a NaN the {words} number", _with(one, fields[0], wrong), fields[:1]


def _wrong_readers(one: Vectors) -> Iterator[tuple[str, Any]]:
    """Words, and the values of a wrong reader."""
    fmt, dims, k_scale, right = one.format, one.widths, one.k_scale, one.values
    fields = fmt.fields(dims)
    if fmt.tile_scales:
        scales = elements(one.stored, fields["kv_c_scales"])
        floored = (scales.view(np.uint32) & SIGN_AND_EXPONENT).view(np.float32)
        for words, wrong in (
            ("floors tile scales to powers of two", floored),
            ("raises tile scales to powers of two", power_of_two_not_below(scales)),
            ("narrows tile scales to bfloat16", scales.astype(ml_dtypes.bfloat16)),
        ):
            stored = _with(one, fields["kv_c_scales"], wrong)
            yield f"{words}, but they are any float32", fmt.decode(stored, dims)
    if fmt.needs_scale:
        ignored = fmt.decode(one.stored, dims, k_scale=1)
        key = np.arange(dims.L + dims.R) >= dims.L
        yield "does not multiply by k_scale", ignored
        yield "does not multiply the key by k_scale", np.where(key, ignored, right)
        yield "divides by k_scale", ignored / np.float32(k_scale)
        other = FORMATS[OTHER_FLOAT8[fmt.name]]
        yield f"takes codes for {other.name}", other.decode(one.stored, dims, k_scale=k_scale)
    if fields["kv_c"].dtype == E4M3.dtype:
        yield "takes the NaN codes for 480", _nan_as_480(one)
    if fmt.name == "int4_per_token":
        yield "takes high nibbles for even columns", fmt.decode(_swapped_nibbles(one), dims)
    if "k_pe_scale" in fields:
        scale = elements(one.stored, fields["kv_c_scale"])
        stored = _with(one, fields["k_pe_scale"], scale)
        yield "multiplies the key by the latent's scale", fmt.decode(stored, dims)
    yield "rounds to bfloat16", right.astype(ml_dtypes.bfloat16)
    yield "rounds to float16", right.astype(np.float16)
    yield "flushes subnormals to zero", np.where(np.abs(right) < 2.0**-126, 0 * right, right)


def _with(one: Vectors, field: Field, values: Any) -> Any:
    """The stored bytes with other elements in one field."""
    stored = one.stored.copy()
    part = np.ascontiguousarray(values.astype(field.dtype)).view(np.uint8)
    stored[:, field.offset : field.offset + field.nbytes] = part
    return stored


def _nan_as_480(one: Vectors) -> Any:
    """What the NaN codes would be if E4M3 had none, as 1.875 times the 256 of code 0x78."""
    stored, nan = one.stored.copy(), np.zeros(one.values.shape, bool)
    columns = {"kv_c": slice(one.L), "k_pe": slice(one.L, None)}
    for field in one.format.layout(one.widths):
        if field.dtype == E4M3.dtype:
            codes = stored[:, field.offset : field.offset + field.nbytes]
            nan[:, columns[field.name]] = (codes & 0x7F) == 0x7F
            codes[nan[:, columns[field.name]]] &= 0xF8
    as_256 = one.format.decode(stored, one.widths, k_scale=one.k_scale)
    return np.where(nan, as_256 * np.float32(1.875), one.values)


def _swapped_nibbles(one: Vectors) -> Any:
    stored = one.stored.copy()
    codes = stored[:, : (one.L + one.R) // 2]
    codes[...] = (codes << 4) | (codes >> 4)
    return stored
