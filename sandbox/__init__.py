"""A sandbox for kernels of Multi-head Latent Attention: the public names, imported on first use."""

from importlib import import_module
from typing import Any

_HOMES = {
    "sandbox.dims": ("MLADims", "PRESETS"),
    "sandbox.cache_formats": (
        "CacheFormat",
        "FORMATS",
        "bytes_per_token",
        "capacity",
        "choose_k_scale",
    ),
    "sandbox.kernels": (
        "OPS",
        "Unavailable",
        "concat_context",
        "concat_context_fp8",
        "concat_insert",
        "concat_insert_decode",
        "concat_insert_prefill",
        "concat_insert_prefill_fp8",
        "decode_attention",
        "dequantize_context",
        "gather",
        "linear",
        "lse_merge",
        "lse_merge_k",
        "prefill_attention",
        "quantize_groups",
        "quantize_nvfp4",
        "quantize_static",
        "rms_norm",
        "sigmoid_gate",
    ),
    "sandbox.layers": ("MLALayer", "MLAWeights", "Rope"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
