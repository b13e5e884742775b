"""Probabilities of keys, for the raw variants of decode_attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.kernels.attention.launch import key_arguments, latent_macros, strides
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse import NATURAL

KERNEL = CudaKernel(Path(__file__).with_name("raw_key_mass.cu"), "write_key_mass")
WARPS = 4
ROW_VALUES = 2560
"""Values of rows that the registers of a warp hold without a spill."""


def write_key_mass(arguments: Mapping[str, Any], lse: Any) -> None:
    """Write all of `key_mass` of a call of decode_attention, by scoring each key once more.

    `lse` is that of the queries, float32 `[B, S, N]` of any strides, in the call's `lse_base` and
    without the sink, such as `launch.request_lse` gives: `exp(score - lse)` is a probability.
    """
    q, mass = arguments["q"], arguments["key_mass"]
    requests, tokens, heads, width = q.shape
    places = mass.shape[2]
    keys = 4 if 4 * width <= ROW_VALUES else 1
    KERNEL(
        requests * tokens * -(-places // (keys * WARPS)),
        32 * WARPS,
        q,
        *key_arguments(arguments),
        strides(q, 3),
        arguments["softmax_scale"],
        arguments["q_descale"],
        arguments["k_scale"],
        lse,
        strides(lse, 3),
        NATURAL[arguments["lse_base"]],
        arguments["sink"],
        mass,
        strides(mass, 2),
        places,
        heads,
        macros={**latent_macros(arguments), "KEYS": keys, "WARPS": WARPS},
    )
