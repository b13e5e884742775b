"""From attention to hidden states: output gate, quantisation on request, output projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.dims import MLADims
from sandbox.kernels import quantise_groups, quantise_nvfp4, quantise_static, sigmoid_gate
from sandbox.kernels.quantise import dequantise_groups, dequantise_nvfp4, dequantise_static
from sandbox.layers.run import Run
from sandbox.layers.step import DecodeInputs

QUANTS: dict[str, int | None] = {
    "fp8_static": None,
    "fp8_group_128": 128,
    "fp8_group_64": 64,
    "nvfp4": 16,
}
"""Ways to quantise the output of attention, and how many values share a scale (None: all)."""


@dataclass(frozen=True)
class Quantised:
    """The output of attention as a quantised output projection takes it.

    Attributes:
        name: in `QUANTS`.
        codes: uint8 `[T, N * V]` E4M3, or `[T, N * V / 2]` pairs of E2M1.
        scales: of groups: float32 `[T, N * V / group]`, or uint8 E4M3 codes for `nvfp4`; None for
            `fp8_static`.
        output_scale: the descale, or `nvfp4`'s global scale; None for groups.
    """

    name: str
    codes: Any
    scales: Any
    output_scale: Any


def checked(name: str | None, scale: Any, dims: MLADims) -> str | None:
    """ValueError for a name, a width or a scale that do not go together."""
    if name is None:
        if scale is not None:
            raise ValueError("output_scale is given, but output_quant is None")
        return None
    if name not in QUANTS:
        raise ValueError(f"output_quant is {name!r}, expected one of {', '.join(QUANTS)}")
    needs_scale = name in ("fp8_static", "nvfp4")
    if needs_scale != (scale is not None):
        wants = "needs one" if needs_scale else "has scales of its own"
        raise ValueError(f"output_scale is {scale}, but {name} {wants}")
    width, group = dims.N * dims.V, QUANTS[name] or 1
    if width % group:
        raise ValueError(f"{name} needs N * V = {width} to be a multiple of {group}")
    return name


def start_gate(run: Run) -> Callable[[], Any]:
    """Begin `g_proj(hidden)` `[T, N * V]`; what is returned gives it to the caller's stream."""
    layer, tokens = run.layer, run.num_tokens
    gate = run.array("gate", tokens, layer.dims.N * layer.dims.V)

    def compute() -> Any:
        run.project(run.hidden[:tokens], layer.weights.g_proj, gate)
        return gate

    return run.beside(compute)


def apply_gate(run: Run, gate: Callable[[], Any], attended: Any) -> None:
    """`attended * sigmoid(gate)`, in place."""
    run.stage("output gate")
    run.op(sigmoid_gate, attended, gate(), out=attended)


def quantised(run: Run, attended: Any, given: Quantised | None) -> Quantised:
    """The output of attention `[T, N * V]` quantised, in arrays of the caller's kind or `given`.

    Raises:
        TypeError, ValueError: `given` has other arrays than this takes.
    """
    if given is not None:
        if not isinstance(given, Quantised):
            raise TypeError(f"out is {type(given).__name__}, expected a Quantised")
        held = {"output_codes": given.codes, "output_scales": given.scales}
        _quantise(run, attended, lambda name, *shape, dtype: arrays.adopt(held[name], name))
        return given
    owners: dict[str, Any] = {}

    def empty(name: str, *shape: int, dtype: Any) -> Any:
        array, owners[name] = run.kind.empty(shape, dtype)
        return array

    found = _quantise(run, attended, empty)
    codes = run.kind.finish(found.codes, owners["output_codes"])
    if found.scales is None:
        return replace(found, codes=codes)
    return replace(
        found, codes=codes, scales=run.kind.finish(found.scales, owners["output_scales"])
    )


def _quantise(run: Run, attended: Any, empty: Callable[..., Any]) -> Quantised:
    layer, (tokens, width) = run.layer, attended.shape
    name, scale = layer.output_quant, layer.output_scale
    group = QUANTS[name]
    run.stage("quantise")
    halves = 2 if name == "nvfp4" else 1
    codes = empty("output_codes", tokens, width // halves, dtype=np.uint8)
    if group is None:
        run.op(quantise_static, attended, scale, out=codes)
        return Quantised(name, codes, None, scale)
    scale_dtype = np.uint8 if name == "nvfp4" else np.float32
    scales = empty("output_scales", tokens, width // group, dtype=scale_dtype)
    if name == "nvfp4":
        run.op(quantise_nvfp4, attended, scale, out=codes, out_scales=scales)
    else:
        run.op(quantise_groups, attended, group_size=group, out=codes, out_scales=scales)
    return Quantised(name, codes, scales, scale)


def _restored(found: Quantised) -> Any:
    """float32 values of codes."""
    if found.name == "fp8_static":
        return dequantise_static(found.codes, found.output_scale)
    if found.name == "nvfp4":
        return dequantise_nvfp4(found.codes, found.scales, found.output_scale)
    return dequantise_groups(found.codes, found.scales)


def project(run: Run, attended: Any, out: Any) -> None:
    """The output projection `[T, N * V]` to `[T, H]`, of restored codes if the layer quantises.

    Raises:
        RuntimeError: codes would be restored while a CUDA graph is captured; capture
            `MLALayer.attention`, which returns them.
    """
    layer = run.layer
    if layer.output_quant is not None:
        if run.kind.gpu is not None and arrays.capturing():
            raise RuntimeError(
                "output_quant restores codes for the output projection in memory that no graph can "
                "keep: capture layer.attention, which returns the codes"
            )
        attended[...] = _restored(_quantise(run, attended, run.array)).astype(attended.dtype)
    run.stage("output projection")
    run.project(attended, layer.weights.o_proj, out, layer.weights.o_bias)
    decode = run.step.decode
    if layer.weights.o_bias is not None and decode is not None and decode.padding is not None:
        _clear_padding(run, decode, out)


def _clear_padding(run: Run, decode: DecodeInputs, out: Any) -> None:
    """0 for a graph's padded requests, whose rows would be the bias."""
    requests, xp = len(decode.padding), run.kind.xp
    padded = run.array("padded_requests", requests, 1, dtype=bool)
    xp.not_equal(decode.padding[:, None], 0, out=padded)
    rows = out[: decode.tokens]
    xp.copyto(rows.reshape(requests, -1, rows.shape[1]), 0, where=padded[:, None])
