"""The 8-bit floats E4M3 (FN: no infinity, one NaN a sign) and E5M2: values to codes and back.

Conversion saturates: what is beyond the largest number, infinities too, becomes that number. A NaN
becomes code 0x7F whatever its sign, as the `cvt.rn.satfinite` instructions of NVIDIA GPUs have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from sandbox import arrays
from sandbox.cache_formats.format import CacheFormat, Field, RowWidths

NAN_CODE = 0x7F


@dataclass(frozen=True)
class Float8:
    """An 8-bit float: its NumPy dtype, the bits of its mantissa, the exponent of its smallest
    normal number, its largest number."""

    dtype: np.dtype
    mantissa_bits: int
    least_exponent: int
    largest: float

    def encode(self, values: Any) -> Any:
        """float32 values to uint8 codes: to nearest, ties to even, saturating."""
        xp = arrays.namespace(values)
        values = values.astype(np.float32)
        bits = values.view(np.uint32)
        magnitude = xp.minimum(xp.abs(values), np.float32(self.largest))
        exponent = (magnitude.view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127
        exponent = xp.maximum(exponent, self.least_exponent)
        unit = ((self.mantissa_bits - exponent + 127) << 23).astype(np.uint32).view(np.float32)
        steps = xp.rint(xp.where(xp.isnan(values), np.float32(0), magnitude) * unit)
        codes = (exponent - self.least_exponent) << self.mantissa_bits
        codes = codes + steps.astype(np.int32)
        codes |= ((bits >> np.uint32(24)) & np.uint32(0x80)).astype(np.int32)
        return xp.where(xp.isnan(values), NAN_CODE, codes).astype(np.uint8)

    def quantize(self, values: Any, descale: Any) -> Any:
        """Codes of values times the reciprocal of their descale, both in float32.

        So attention's heads and outputs are coded; a cache row takes the quotient.
        """
        with np.errstate(all="ignore"):
            return self.encode(values.astype(np.float32) * (np.float32(1) / descale))

    def decode(self, codes: Any) -> Any:
        """uint8 codes to float32 values, exactly."""
        xp = arrays.namespace(codes)
        table = np.arange(256, dtype=np.uint8).view(self.dtype).astype(np.float32)
        return xp.asarray(table)[codes]


E4M3 = Float8(np.dtype(ml_dtypes.float8_e4m3fn), 3, -6, 448.0)
E5M2 = Float8(np.dtype(ml_dtypes.float8_e5m2), 2, -14, 57344.0)


def per_tensor(name: str, kind: Float8) -> CacheFormat:
    """One code a value, latent and key alike, all of a tensor with one descale.

    stored = value / k_scale (an IEEE float32 quotient), read = code * k_scale.
    """

    def layout(dims: RowWidths) -> tuple[Field, ...]:
        return Field("kv_c", 0, kind.dtype, dims.L), Field("k_pe", dims.L, kind.dtype, dims.R)

    def encode(rows: Any, dims: RowWidths, k_scale: np.float32) -> Any:
        with np.errstate(all="ignore"):
            return kind.encode(rows.astype(np.float32) / k_scale)

    def decode(stored: Any, dims: RowWidths, k_scale: np.float32) -> Any:
        with np.errstate(all="ignore"):
            return kind.decode(stored) * k_scale

    return CacheFormat(
        name=name,
        storage=np.dtype(np.uint8),
        layout=layout,
        encode_row=encode,
        decode_row=decode,
        needs_scale=True,
        float8=kind.dtype.name,
    )
