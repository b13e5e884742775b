"""Dims and RoPE of an MLA model, read from its Hugging Face config.

For DeepSeek-V2 and V3, Kimi K2, and the MLA layers of Kimi-Linear, which know no positions (NoPE).
A config is a mapping, an object with attributes (transformers' own), or the path of a `config.json`
or of the folder that holds one; where a `text_config` lies in it, that is read. RoPE's parameters
may be in a `rope_parameters`, as transformers 5 writes, or in `rope_scaling` beside `rope_theta`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sandbox.dims import MLADims
from sandbox.layers.rope import Rope

# Of the norms of both latents. The models' code builds the two with its class's default, whatever
# the config's rms_norm_eps is: that is for the norms outside attention.
NORM_EPS = 1e-6

# Models whose code rotates pairs (2i, 2i + 1) with no key in the config that says so.
_INTERLEAVED = ("deepseek_v2", "deepseek_v3", "kimi_k2")

# What each type of RoPE must and may have beside `rope_theta`.
_NEEDED = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_OPTIONAL = {
    "yarn": {
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
}

Reader = Callable[[str, Any], Any]  # the value of a key, or a default for one that is not there


def dims_of(config: Any) -> MLADims:
    """Dims of one MLA layer with all its heads; `rope` is False for NoPE and where `R` is 0.

    Raises:
        ValueError: a key is missing, or a width is impossible.
        OSError: no such file.
    """
    return _dims(_reader(config))


def rope_of(config: Any, max_positions: int | None = None) -> Rope | None:
    """The table of the model's RoPE and its softmax factor; None for a model without RoPE.

    YaRN is DeepSeek's: a missing `mscale` is 1, a missing `mscale_all_dim` 0, which leaves the
    softmax scale alone. (Where just one of them is there, transformers' table uses neither.)

    Args:
        config: as for `dims_of`.
        max_positions: rows of the table, or None for all that the model is made for: with YaRN the
            stretched context, otherwise `max_position_embeddings`.

    Raises:
        ValueError: a key is missing, a number is impossible, or RoPE is of a type, or has a
            parameter, that is not supported.
        OSError: no such file.
    """
    get = _reader(config)
    dims = _dims(get)
    if not dims.rope:
        return None
    kind, given = _rope_parameters(get)
    given["interleaved"] = _interleaved(get)
    if kind == "yarn":
        given["original_max_positions"] = given.pop("original_max_position_embeddings")
    elif max_positions is None:
        max_positions = get("max_position_embeddings", None) or get("model_max_length", None)
        if max_positions is None:
            raise ValueError("config has no max_position_embeddings: give max_positions")
    return getattr(Rope, kind)(dims.R, max_positions=max_positions, **given)


def _reader(config: Any) -> Reader:
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"))
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    text = get("text_config", None)
    return get if text is None else _reader(text)


def _dims(get: Reader) -> MLADims:
    def needed(name: str) -> Any:
        value = get(name, None)
        if value is None:
            raise ValueError(f"config has no {name}, expected the config of an MLA model")
        return value

    # Null stands for a full projection of q, but transformers' classes fill in other defaults.
    q_lora_rank = get("q_lora_rank", "absent")
    if q_lora_rank == "absent":
        raise ValueError("config has no q_lora_rank, expected a width, or null for a full q_proj")
    width = needed("qk_rope_head_dim")
    return MLADims(
        num_heads=needed("num_attention_heads"),
        hidden_size=needed("hidden_size"),
        kv_lora_rank=needed("kv_lora_rank"),
        qk_nope_head_dim=needed("qk_nope_head_dim"),
        qk_rope_head_dim=width,
        v_head_dim=needed("v_head_dim"),
        q_lora_rank=q_lora_rank,
        rope=bool(width) and not _is_nope(get),
    )


def _is_nope(get: Reader) -> bool:
    """What `mla_use_nope` says; transformers' own class for Kimi-Linear does without the key."""
    given = get("mla_use_nope", None)
    return get("model_type", None) == "kimi_linear" if given is None else bool(given)


def _interleaved(get: Reader) -> bool:
    model = get("model_type", "deepseek_v3")
    given = get("rope_interleave", True if model in _INTERLEAVED else None)
    if not isinstance(given, bool):
        raise ValueError(
            f"rope_interleave is {given!r} in a config of model_type {model!r}, expected true for "
            "pairs (2i, 2i + 1) or false for (i, i + R / 2)"
        )
    return given


def _rope_parameters(get: Reader) -> tuple[str, dict[str, Any]]:
    """The type of RoPE, and its parameters that are not null, with `theta` for `rope_theta`."""
    stored = get("rope_scaling", None) or get("rope_parameters", None) or {}
    if not isinstance(stored, Mapping):
        raise ValueError(f"rope_parameters is {stored!r}, expected names and numbers")
    given = {name: value for name, value in stored.items() if value is not None}
    older_type = given.pop("type", "default")
    kind = given.pop("rope_type", older_type)
    kind = "yarn" if kind == "deepseek_yarn" else kind  # as vLLM calls it once it has read one
    if kind not in _NEEDED:
        raise ValueError(f"RoPE is of type {kind!r}, expected one of {', '.join(_NEEDED)}")
    part = given.pop("partial_rotary_factor", get("partial_rotary_factor", None))
    if part not in (None, 1):
        raise ValueError(f"partial_rotary_factor is {part!r}, expected none: all of R is rotated")
    theta = given.pop("rope_theta", get("rope_theta", None))
    missing = sorted(_NEEDED[kind] - given.keys())
    if missing:
        raise ValueError(f"RoPE of type {kind} has no {', '.join(missing)}")
    unknown = sorted(given.keys() - _NEEDED[kind] - _OPTIONAL.get(kind, set()))
    if unknown:
        raise ValueError(f"RoPE of type {kind} has {', '.join(unknown)}, which is not supported")
    return kind, given if theta is None else {**given, "theta": theta}
