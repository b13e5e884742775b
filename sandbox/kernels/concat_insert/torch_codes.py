"""Codes and cache rows as a torch user would write them; float32 tensors in, uint8 out."""

from __future__ import annotations

from typing import Any


def float8(values: Any, name: str) -> Any:
    """Codes of `float8_e4m3fn` or `float8_e5m2`, saturating; torch's own cast does not."""
    import torch

    dtype = getattr(torch, name)
    largest = torch.finfo(dtype).max
    codes = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    return torch.where(values.isnan(), 0x7F, codes)


def encode_rows(
    latent: Any, key: Any, cache_format: str, k_scale: Any, tile_scale: str | None
) -> Any:
    """Rows `[T, row bytes]` of a packed format, of latents `[T, L]` and keys `[T, R]`."""
    import torch

    if k_scale is not None:
        name = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}[cache_format]
        return float8(torch.cat([latent, key], dim=-1) / k_scale, name)
    if cache_format == "fp8_ds_mla":
        return _ds_mla(latent, key, tile_scale)
    return _per_token(latent, key, 7 if cache_format == "int4_per_token" else 127)


def _ds_mla(latent: Any, key: Any, tile_scale: str | None) -> Any:
    import torch

    tiles = latent.unflatten(-1, (-1, 128))
    amax = torch.where(tiles.isfinite(), tiles.abs(), 0).amax(dim=-1)
    if tile_scale == "pow2":
        bits = _divided(amax, 448, least=1e-4).view(torch.int32)
        scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    else:
        scales = _divided(amax, 448)
    codes = float8(tiles / scales[..., None], "float8_e4m3fn").flatten(-2)
    return torch.cat([codes, _bytes(scales), _bytes(key.bfloat16())], dim=-1)


def _per_token(latent: Any, key: Any, largest: int) -> Any:
    import torch

    codes, scales = zip(*(_integers(part, largest) for part in (latent, key)))
    codes = torch.cat(codes, dim=-1).view(torch.uint8)
    if largest == 7:
        codes = (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)
    return torch.cat([codes, _bytes(torch.cat(scales, dim=-1))], dim=-1)


def _integers(values: Any, largest: int) -> tuple[Any, Any]:
    """int8 codes and the scale `[T, 1]`, which is NaN where a value is not finite."""
    import torch

    amax = torch.nn.functional.pad(values.abs(), (0, 1)).amax(dim=-1, keepdim=True)
    scale = torch.where(amax.isfinite(), _divided(amax, largest), torch.nan)
    return (values / scale).round().nan_to_num(0).to(torch.int8), scale


def _divided(amax: Any, largest: float, least: float | None = None) -> Any:
    """amax / largest, at least the smallest normal number. By a tensor: on a GPU torch multiplies
    by the reciprocal of a Python number."""
    import torch

    least = torch.finfo(torch.float32).tiny if least is None else least
    return (amax / torch.full_like(amax, largest)).clamp(min=least)


def _bytes(values: Any) -> Any:
    import torch

    return values.contiguous().view(torch.uint8)
