"""What a checkpoint must be for a layer's weights to be taken from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from sandbox import arrays
from sandbox.dims import MLADims
from sandbox.kernels import require
from sandbox.layers.weight_codes import CODE_DTYPES, SCALE_SUFFIX
from sandbox.layers.weight_layout import TensorLayout
from sandbox.layers.weight_sources import StoredTensor

# Buffers that older checkpoints hold; rotary embedding has no weights.
IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_SHOWN = 8


def check_names(
    names: Collection[str], prefix: str, layout: Mapping[str, TensorLayout], dims: MLADims
) -> None:
    """Raises ValueError with what is missing and with what is under `prefix` and unknown."""
    known = {each.name for each in layout.values()}
    known |= {each.name + SCALE_SUFFIX for each in layout.values() if each.is_projection}
    known |= {prefix + name for name in IGNORED}
    missing = [e.name for e in layout.values() if not e.is_optional and e.name not in names]
    unknown = sorted(name for name in names if name.startswith(prefix) and name not in known)
    problems = []
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        problems.append(f"unknown {', '.join(unknown[:_SHOWN])}{more}")
    if f"{prefix}q_proj.weight" in unknown:
        problems.append(f"q_proj is there, but dims.q_lora_rank is {dims.q_lora_rank}, not None")
    if f"{prefix}q_a_proj.weight" in unknown:
        problems.append("q_a_proj is there, but dims.q_lora_rank is None")
    if f"{prefix}g_proj.weight" in unknown:
        problems.append("g_proj is an output gate's: output_gate=True takes it")
    layers = [n.removesuffix("kv_b_proj.weight") for n in names if n.endswith(".kv_b_proj.weight")]
    if f"{prefix}kv_b_proj.weight" in missing and layers:
        problems.append(f"layers are under {layers[0]!r} and {len(layers) - 1} other prefixes")
    if problems:
        raise ValueError(f"weights under prefix {prefix!r}: {'; '.join(problems)}")


def check_shapes(stored: Mapping[str, StoredTensor], layout: Iterable[TensorLayout]) -> None:
    """Raises ValueError with all tensors that have another shape than the dims say."""
    problems = [
        f"{each.name} has shape {stored[each.name].shape}, expected {each.shape}: "
        f"[{', '.join(each.axes)}]"
        for each in layout
        if stored[each.name].shape != each.shape
    ]
    if problems:
        raise ValueError("; ".join(problems))


def common_dtype(stored: Mapping[str, StoredTensor], layout: Iterable[TensorLayout]) -> np.dtype:
    """The one dtype of all tensors but norms, which may be float32; TypeError if it is not one."""
    layout = list(layout)
    first = next(stored[each.name] for each in layout if each.is_projection)
    for each in layout:
        name, dtype = each.name, stored[each.name].dtype
        if dtype in CODE_DTYPES:
            raise TypeError(f"{name} is {dtype}, codes without their scales, {name}{SCALE_SUFFIX}")
        if dtype not in [allowed.name for allowed in require.FLOATS]:
            raise TypeError(f"{name} is {dtype}, expected float32, float16 or bfloat16")
        if dtype != first.dtype and not (each.is_norm and dtype == "float32"):
            raise TypeError(f"{name} is {dtype}, expected {first.dtype} as {first.name}")
    return arrays.DTYPES[first.dtype]
