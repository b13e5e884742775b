"""From attention to hidden states: output gate, quantization on request, output projection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sandbox import arrays
from sandbox.dims import MLADims
from sandbox.kernels import quantize_groups, quantize_nvfp4, quantize_static, sigmoid_gate
from sandbox.kernels.quantize import dequantize_groups, dequantize_nvfp4, dequantize_static
from sandbox.layers.run import Run
from sandbox.layers.step import DecodeInputs

if TYPE_CHECKING:
    from sandbox.layers.mla import MLALayer

QUANTS: dict[str, int | None] = {
    "fp8_static": None,
    "fp8_group_128": 128,
    "fp8_group_64": 64,
    "nvfp4": 16,
}
"""Ways to quantize the output of attention, and how many values share a scale (None: all)."""


@dataclass(frozen=True)
class Quantized:
    """The output of attention as a quantized output projection takes it.

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
        run.stage("projections")
        run.project(run.hidden[:tokens], layer.weights.g_proj, gate)
        return gate

    return run.beside(compute)


def apply_gate(run: Run, gate: Callable[[], Any], attended: Any) -> None:
    """`attended * sigmoid(gate)`, in place."""
    projected = gate()
    run.stage("output gate")
    run.op(sigmoid_gate, attended, projected, out=attended)


def layouts(layer: MLALayer, tokens: int) -> dict[str, tuple[tuple[int, int], Any]]:
    """Shape and dtype of the arrays that hold the output of attention before `o_proj`.

    That is `out`, or of a layer that quantizes `out.codes`, and `out.scales` where there are some.
    """
    name, width = layer.output_quant, layer.dims.N * layer.dims.V
    if name is None:
        return {"out": ((tokens, width), layer.dtype)}
    packed = name == "nvfp4"
    found = {"out.codes": ((tokens, width // 2 if packed else width), np.uint8)}
    if group := QUANTS[name]:
        scales = (tokens, width // group)
        found["out.scales"] = (scales, np.uint8 if packed else np.float32)
    return found


def given(layer: MLALayer, out: Any) -> dict[str, Any]:
    """What the caller gives for `layouts`, by those names; None where it gives nothing.

    Raises:
        TypeError, ValueError: codes where the layer has numbers, those of another quantization.
    """
    if layer.output_quant is None:
        if isinstance(out, Quantized):
            raise TypeError("out is a Quantized, but output_quant is None")
        return {"out": out}
    if out is None:
        return {"out.codes": None, "out.scales": None}
    if not isinstance(out, Quantized):
        raise TypeError(f"out is {type(out).__name__}, expected a Quantized")
    if out.name != layer.output_quant:
        raise ValueError(f"out is of {out.name}, but output_quant is {layer.output_quant}")
    return {"out.codes": out.codes, "out.scales": out.scales}


def attended(layer: MLALayer, results: Mapping[str, Any]) -> Any:
    """The arrays of `layouts` as `MLALayer.attention` returns them."""
    if layer.output_quant is None:
        return results["out"]
    codes, scales = results["out.codes"], results.get("out.scales")
    return Quantized(layer.output_quant, codes, scales, layer.output_scale)


def quantize(run: Run, attended: Any, results: Mapping[str, Any]) -> None:
    """The output of attention `[T, N * V]` as codes and scales, into the arrays of `layouts`."""
    layer = run.layer
    name, scale, codes = layer.output_quant, layer.output_scale, results["out.codes"]
    run.stage("quantize")
    if name == "fp8_static":
        run.op(quantize_static, attended, scale, out=codes)
    elif name == "nvfp4":
        run.op(quantize_nvfp4, attended, scale, out=codes, out_scales=results["out.scales"])
    else:
        scales, group = results["out.scales"], QUANTS[name]
        run.op(quantize_groups, attended, group_size=group, out=codes, out_scales=scales)


def _restored(layer: MLALayer, results: Mapping[str, Any]) -> Any:
    """float32 values of codes."""
    codes = results["out.codes"]
    if layer.output_quant == "fp8_static":
        return dequantize_static(codes, layer.output_scale)
    if layer.output_quant == "nvfp4":
        return dequantize_nvfp4(codes, results["out.scales"], layer.output_scale)
    return dequantize_groups(codes, results["out.scales"])


def project(run: Run, attended: Any, out: Any) -> None:
    """The output projection `[T, N * V]` to `[T, H]`, of restored codes if the layer quantizes.

    Raises:
        RuntimeError: codes would be restored while a CUDA graph is captured; capture
            `MLALayer.attention`, which returns them.
    """
    layer = run.layer
    if layer.output_quant is not None:
        if arrays.capturing(run.kind):
            raise RuntimeError(
                "output_quant restores codes for the output projection in memory that no graph can "
                "keep: capture layer.attention, which returns the codes"
            )
        results = {
            name: run.array(name, *shape, dtype=dtype)
            for name, (shape, dtype) in layouts(layer, len(attended)).items()
        }
        quantize(run, attended, results)
        attended[...] = _restored(layer, results).astype(attended.dtype)
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
