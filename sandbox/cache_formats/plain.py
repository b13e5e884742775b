"""Rows of one element a value, as they are."""

from __future__ import annotations

import numpy as np

from sandbox.cache_formats.format import CacheFormat, Field, RowWidths


def plain(name: str, dtype: np.dtype) -> CacheFormat:
    """Elements of `dtype`, the latent first."""

    def layout(dims: RowWidths) -> tuple[Field, ...]:
        latent = Field("kv_c", 0, dtype, dims.L)
        return latent, Field("k_pe", latent.nbytes, dtype, dims.R)

    return CacheFormat(
        name=name,
        storage=dtype,
        layout=layout,
        encode_row=lambda rows, dims: rows.astype(dtype),
        decode_row=lambda stored, dims: stored.astype(np.float32),
        alignment=dtype.itemsize,
    )
