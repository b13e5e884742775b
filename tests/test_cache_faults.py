"""Planted faults of writers and readers: the conformance vectors find each, and name some."""

from collections import Counter
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from sandbox.cache_formats import E4M3, E5M2
from sandbox.cache_formats.mismatch import compare_stored, compare_values
from sandbox.cache_formats.vectors import load

LARGEST = {"int8_per_token": 127, "int4_per_token": 7}
TINY = np.float32(2.0**-126)


def float32(v):
    return v.rows.astype(np.float32)


def quotients(v):
    return float32(v) / np.float32(v.k_scale)


def scaled(v, factor):
    """Per-tensor codes of the rows times `factor`."""
    return v.format.encode(float32(v) * np.float32(factor), v.widths, k_scale=1)


def through(dtype, v):
    """Rounds first to a wider type, then to the code."""
    kind = E4M3 if v.cache_format == "fp8_e4m3" else E5M2
    return kind.encode(quotients(v).astype(dtype).astype(np.float32))


def cast(v):
    """Converts without saturating; a NaN keeps its sign."""
    return quotients(v).astype(v.format.layout(v.widths)[0].dtype).view(np.uint8)


def towards_zero(v):
    codes = v.stored.copy()
    numbers = v.format.decode(codes, v.widths, k_scale=1)
    return np.where(np.abs(numbers) > np.abs(quotients(v)), codes - 1, codes).astype(np.uint8)


def clamped(number, v):
    """A NaN goes through min and max and becomes a number."""
    codes = v.stored.copy()
    width = v.L if v.format.tile_scales else v.L + v.R
    codes[:, :width][np.isnan(float32(v)[:, :width])] = number
    return codes


def float16_key(v):
    """Copies the 16 bits of the key, whatever they are."""
    stored = v.stored.copy()
    if v.rows.dtype == np.float16:
        stored[:, -2 * v.R :] = np.ascontiguousarray(v.rows[:, v.L :]).view(np.uint8)
    return stored


def tiles_of(v):
    return float32(v)[:, : v.L].reshape(len(v.rows), -1, 128)


def with_scales(v, scales):
    """ds_mla rows for other scales than one's own."""
    scales = scales.astype(np.float32)
    codes = E4M3.encode(tiles_of(v) / scales[..., None]).reshape(len(v.rows), -1)
    key = v.stored[:, v.L + v.L // 32 :]
    return np.concatenate([codes, scales.view(np.uint8), key], axis=1)


def raw(v, least=TINY, finite=np.isfinite, absolute=np.abs, largest=448, factor=None, power=None):
    """A writer of the rule `"raw"`, of which one thing may be changed."""
    tiles = tiles_of(v)
    amax = np.where(finite(tiles), absolute(tiles), 0).max(-1)
    scale = amax / np.float32(largest) if factor is None else amax * np.float32(factor)
    scale = np.maximum(scale, np.float32(least))
    return with_scales(v, scale if power is None else np.exp2(power(np.log2(scale))))


def pow2(v, least=1e-4, power=np.ceil, **changes):
    """The same of `"pow2"`, by a logarithm."""
    return raw(v, least, power=power, **changes)


def other_rule(v):
    (rule,) = {"pow2", "raw"} - {v.tile_scale}
    return v.format.encode(v.rows, v.widths, tile_scale=rule)


def integers(
    v, to_integer=np.rint, absolute=np.abs, divisor=0, least=TINY, reciprocal=False, low=0
):
    """A per-token writer, of which one thing may be changed."""
    largest = LARGEST[v.cache_format]
    codes, scales = [], []
    for half in (float32(v)[:, : v.L], float32(v)[:, v.L :]):
        amax = absolute(half).max(-1, keepdims=True, initial=0)
        scale = np.maximum(amax / np.float32(divisor or largest), least)
        scale = np.where(np.isfinite(half).all(-1, keepdims=True), scale, np.nan).astype(np.float32)
        quotient = half * (np.float32(1) / scale) if reciprocal else half / scale
        code = np.clip(to_integer(quotient), low or -largest, largest)
        codes.append(np.where(np.isnan(scale), 0, code).astype(np.int8))
        scales.append(scale)
    codes, scales = np.concatenate(codes, axis=1), np.concatenate(scales, axis=1)
    if largest == 7:
        codes = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    return np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=1)


def swapped(v):
    codes = v.stored[:, :-8]
    return np.concatenate([(codes << 4) | (codes >> 4), v.stored[:, -8:]], axis=1)


def away(x):
    """Half-way from zero, where it should be to even."""
    return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def itself(x):
    return x


DS_MLA, INTS = "fp8_ds_mla", ("int8_per_token", "int4_per_token")
WRITERS = [
    ("multiplies", "fp8_e4m3", lambda v: scaled(v, v.k_scale), "multiplies by k_scale"),
    ("reciprocal", "fp8_e4m3", lambda v: scaled(v, 1 / np.float32(v.k_scale)), "the reciprocal of"),
    ("unscaled", "fp8_e5m2", lambda v: scaled(v, 1), "ignores k_scale"),
    ("cast", "fp8_e4m3", cast, "does not saturate"),
    ("cast", "fp8_e5m2", cast, "does not saturate"),
    ("through float16", "fp8_e4m3", partial(through, np.float16), ""),
    ("through bfloat16", "fp8_e4m3", partial(through, ml_dtypes.bfloat16), ""),
    ("through float16", "fp8_e5m2", partial(through, np.float16), ""),
    ("towards zero", "fp8_e4m3", towards_zero, ""),
    ("NaN clamped up", "fp8_e4m3", partial(clamped, 0x7E), "makes a NaN the largest"),
    ("NaN clamped down", "fp8_e5m2", partial(clamped, 0xFB), "makes a NaN the least"),
    ("NaN clamped down", DS_MLA, partial(clamped, 0xFE), "makes a NaN the least"),
    ("key in float16", DS_MLA, float16_key, ""),
    ("other rule", DS_MLA, other_rule, "follows tile_scale"),
    ("floor for ceil", "pow2", partial(pow2, power=np.floor), ""),
    ("rounded log2", "pow2", partial(pow2, power=np.rint), ""),
    ("lower least scale", "pow2", partial(pow2, least=1e-5), ""),
    ("NaN in amax", "raw", partial(raw, finite=lambda x: x == x), ""),
    ("infinity in amax", "pow2", partial(pow2, finite=lambda x: ~np.isnan(x)), ""),
    ("no abs", "raw", partial(raw, absolute=itself), "without abs"),
    ("times 1 / 448", "raw", partial(raw, factor=np.float32(1) / np.float32(448)), ""),
    ("of 240", "raw", partial(raw, largest=240), ""),
    *[("no abs", name, partial(integers, absolute=itself), "without abs") for name in INTS],
    *[("half away", name, partial(integers, to_integer=away), "") for name in INTS],
    *[("reciprocal", name, partial(integers, reciprocal=True), "") for name in INTS],
    *[("least 1e-10", name, partial(integers, least=np.float32(1e-10)), "") for name in INTS],
    ("of 128", "int8_per_token", partial(integers, divisor=128, low=-128), ""),
    ("of 8", "int4_per_token", partial(integers, divisor=8, low=-8), ""),
    ("nibbles swapped", "int4_per_token", swapped, "even columns in high nibbles"),
]


def of_format(name):
    """Vectors of a format, or of one rule for tiles."""
    return [v for v in load() if name in (v.cache_format, v.tile_scale)]


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [pytest.param(*fault[1:], id=f"{fault[1]} {fault[0]}") for fault in WRITERS],
)
@np.errstate(all="ignore")
def test_a_wrong_writer_is_found(name, write, named):
    found = [compare_stored(v, write(v)) for v in of_format(name) if v.rows is not None]
    found = [wrong for wrong in found if wrong]
    assert found
    assert all(wrong.got != wrong.expected and wrong.field for wrong in found)
    likely = Counter(wrong.suspicion for wrong in found).most_common(1)[0][0]
    assert named in likely if named else not likely


@pytest.mark.parametrize(
    ("name", "write"), [("pow2", pow2), ("raw", raw), *[(n, integers) for n in INTS]]
)
@np.errstate(all="ignore")
def test_the_planted_writers_are_right_without_their_fault(name, write):
    for v in of_format(name):
        if v.rows is not None:
            assert compare_stored(v, write(v)) is None, v.label


def read(v, stored=None, **changes):
    scales = {"k_scale": v.k_scale, **changes}
    return v.format.decode(v.stored if stored is None else stored, v.widths, **scales)


def with_elements(v, name, change):
    """The stored bytes with other elements in one field."""
    stored, place = v.stored.copy(), v.format.fields(v.widths)[name]
    part = stored[:, place.offset : place.offset + place.nbytes]
    elements = change(np.ascontiguousarray(part).view(place.dtype)).astype(place.dtype)
    part[...] = np.ascontiguousarray(elements).view(np.uint8)
    return stored


def tile_scales(change):
    return lambda v: read(v, with_elements(v, "kv_c_scales", change))


def floored(scales):
    _, exponent = np.frexp(scales)
    return np.where(np.isfinite(scales) & (scales > 0), np.ldexp(np.float32(0.5), exponent), scales)


def exponent_only(scales):
    return (scales.view(np.uint32) & np.uint32(0x7F80_0000)).view(np.float32)


def nan_as_480(v):
    codes = v.stored[:, : v.L] if v.format.tile_scales else v.stored
    values = v.values.copy()
    width = codes.shape[1]
    if v.format.tile_scales:
        scales = np.repeat(v.stored[:, v.L : v.L + v.L // 32].copy().view(np.float32), 128, axis=1)
    else:
        scales = np.full(codes.shape, v.k_scale, np.float32)
    numbers = np.where(codes > 0x7F, np.float32(-480), np.float32(480)) * scales
    values[:, :width] = np.where((codes & 0x7F) == 0x7F, numbers, values[:, :width])
    return values


def no_subnormal_codes(v):
    tiny = (v.stored & 0x78) == 0
    return np.where(tiny, np.float32(0), v.values)


def key_unscaled(v):
    return np.where(np.arange(v.L + v.R) < v.L, v.values, read(v, k_scale=1))


def unsigned_nibbles(v):
    codes = np.stack([v.stored[:, :-8] & 15, v.stored[:, :-8] >> 4], axis=-1)
    scales = np.repeat(v.stored[:, -8:].copy().view(np.float32), [v.L, v.R], axis=1)
    return codes.reshape(scales.shape).astype(np.float32) * scales


READERS = [
    ("floors scales", DS_MLA, tile_scales(exponent_only), "floors tile scales to powers of two"),
    ("floors by frexp", "raw", tile_scales(floored), "floors tile scales to powers of two"),
    ("scales in bf16", "raw", tile_scales(lambda s: s.astype(ml_dtypes.bfloat16)), "to bfloat16"),
    ("tiles of 64", DS_MLA, tile_scales(lambda s: np.repeat(s, 2, axis=1)[:, : s.shape[1]]), ""),
    ("big-endian scales", DS_MLA, tile_scales(np.ndarray.byteswap), ""),
    ("NaN is 480", DS_MLA, nan_as_480, "takes the NaN codes for 480"),
    ("NaN is 480", "fp8_e4m3", nan_as_480, "takes the NaN codes for 480"),
    ("no subnormals", "fp8_e4m3", no_subnormal_codes, ""),
    ("unscaled", "fp8_e5m2", lambda v: read(v, k_scale=1), "does not multiply by k_scale"),
    ("divides", "fp8_e4m3", lambda v: read(v, k_scale=1) / np.float32(v.k_scale), "divides by"),
    ("key unscaled", "fp8_e4m3", key_unscaled, "does not multiply the key"),
    ("in bfloat16", "fp8_e4m3", lambda v: float32_of(v.values, ml_dtypes.bfloat16), "to bfloat16"),
    ("in float16", "int8_per_token", lambda v: float32_of(v.values, np.float16), "to float16"),
    ("nibbles swapped", "int4_per_token", lambda v: read(v, swapped(v)), "high nibbles for even"),
    ("unsigned nibbles", "int4_per_token", unsigned_nibbles, ""),
]


def float32_of(values, dtype):
    return values.astype(dtype).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "reader", "named"),
    [pytest.param(*fault[1:], id=f"{fault[1]} {fault[0]}") for fault in READERS],
)
@np.errstate(all="ignore")
def test_a_wrong_reader_is_found(name, reader, named):
    found = [wrong for v in of_format(name) if (wrong := compare_values(v, reader(v)))]
    assert found
    likely = Counter(wrong.suspicion for wrong in found).most_common(1)[0][0]
    assert named in likely if named else not likely


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cache_format", ["int8_per_token", "fp8_ds_mla"])
def test_scales_in_the_wrong_order_are_found_in_each_input_type(cache_format, dtype):
    """A writer that takes one input type alone is seen by the vectors of that type."""
    own = [v for v in load() if v.cache_format == cache_format and v.rows is not None]
    own = [v for v in own if v.rows.dtype.name == dtype]
    assert len(own) >= 2

    def wrong(v):
        stored = v.stored.copy()
        for field in v.format.layout(v.widths):
            if field.name.startswith("kv_c_scale"):
                part = slice(
                    field.offset, field.offset + (8 if "int8" in cache_format else field.nbytes)
                )
                scales = np.ascontiguousarray(stored[:, part]).view(np.float32)
                stored[:, part] = np.ascontiguousarray(scales[:, ::-1]).view(np.uint8)
        return stored

    assert any(compare_stored(v, wrong(v)) for v in own)
    assert not any(compare_stored(v, v.stored) for v in own)
