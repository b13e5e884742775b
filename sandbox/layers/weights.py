"""The weights of an MLA layer, as one tensor-parallel rank holds them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.dims import MLADims
from sandbox.kernels import require
from sandbox.layers.weight_checks import check_names, check_shapes, common_dtype
from sandbox.layers.weight_codes import SCALE_SUFFIX, restored
from sandbox.layers.weight_layout import layer_layout
from sandbox.layers.weight_sources import open_source


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class MLAWeights:
    """One rank's weights: NumPy or CuPy arrays of one dtype on one device, their rows contiguous.

    `load` makes and checks them. Projections are `[out, in]`; letters are those of `dims`, so `N`
    is the number of the rank's own heads.

    Attributes:
        dims: of this rank, `num_heads` divided by `tp_size`.
        tp_rank: this rank.
        tp_size: tensor-parallel ranks; their outputs sum to the layer's.
        q_proj: `[N * (P + R), H]`, each head `[q_nope, q_pe]`; only where `q_lora_rank` is None.
        q_a_proj: `[Lq, H]`; this and the next two only where `q_lora_rank` is not None.
        q_a_layernorm: `[Lq]`.
        q_b_proj: `[N * (P + R), Lq]`, heads as those of `q_proj`.
        kv_a_proj: `[L + R, H]`: `kv_c` before its norm, then `k_pe`.
        kv_a_layernorm: `[L]`.
        kv_b_proj: `[N * (P + V), L]`, each head `[k_nope, v]`.
        o_proj: `[H, N * V]`.
        g_proj: `[N * V, H]`, the output gate's, or None.
        q_a_bias: `[Lq]` or None.
        kv_a_bias: `[L + R]` or None.
        o_bias: `[H]` or None; rank 0 alone has it, so that it is added once.
    """

    dims: MLADims
    tp_rank: int = 0
    tp_size: int = 1
    kv_a_proj: Any
    kv_a_layernorm: Any
    kv_b_proj: Any
    o_proj: Any
    q_proj: Any = None
    q_a_proj: Any = None
    q_a_layernorm: Any = None
    q_b_proj: Any = None
    g_proj: Any = None
    q_a_bias: Any = None
    kv_a_bias: Any = None
    o_bias: Any = None

    @classmethod
    def load(
        cls,
        source: Any,
        dims: MLADims,
        *,
        prefix: str = "",
        output_gate: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> MLAWeights:
        """A rank's part of a layer's weights, named as in Hugging Face's DeepseekV3Attention.

        Arrays in memory are shared, not copied: a change of the caller's tensor shows here, and a
        rank's part is a view. Of files, just the bytes of the part are read, to the CPU; `to` moves
        them. Two kinds of tensors are converted, so copied: float32 norm weights beside projections
        of half precision, to the projections' dtype; and E4M3 codes (``float8_e4m3fn``, or uint8)
        with ``X.weight_scale_inv`` beside ``X.weight``, to bfloat16.

        Args:
            source: an ``nn.Module`` or other object with a ``state_dict``; a mapping of names to
                NumPy, CuPy, torch or JAX arrays; or a path: a ``.safetensors`` file, a folder of
                them, or an index, ``model.safetensors.index.json``.
            dims: of the whole model.
            prefix: of the layer's names, such as ``model.layers.3.self_attn``; a dot at its end may
                be left out. What has another is ignored, as are ``rotary_emb.inv_freq``,
                ``rotary_emb.cos_cached`` and ``rotary_emb.sin_cached``.
            output_gate: whether the layer has an output gate, ``g_proj.weight``.
            tp_rank: which part of the heads to take.
            tp_size: the number of parts.

        Raises:
            ValueError: tensors are missing, unknown under `prefix`, misshapen, on different devices
                or not contiguous along a row; `tp_size` does not divide the heads, or `tp_rank` is
                not below it; a file cannot be read.
            TypeError: `source` or one of its values is of no kind above, or a dtype is not float32,
                float16 or bfloat16, or not that of the other weights.
            FileNotFoundError: there is no such path, or a file that an index names.
        """
        rank_dims = _rank_dims(dims, tp_rank, tp_size)
        require.flag(output_gate, "output_gate")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix is {type(prefix).__name__}, expected a str")
        prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
        layout = layer_layout(dims, output_gate, prefix)
        source = open_source(source)
        check_names(source.names, prefix, layout, dims)
        there = {field: each for field, each in layout.items() if each.name in source.names}
        names = [each.name for each in there.values()]
        coded = [name for name in names if name + SCALE_SUFFIX in source.names]
        with source.opened(names + [name + SCALE_SUFFIX for name in coded]) as stored:
            check_shapes(stored, there.values())
            stored |= {name: restored(stored[name], stored[name + SCALE_SUFFIX]) for name in coded}
            dtype = common_dtype(stored, there.values())
            if tp_rank > 0:
                there.pop("o_bias", None)
            parts = {}
            for field, each in there.items():
                part = stored[each.name].read(each.of_rank(tp_rank, tp_size))
                require.strided_rows(part, each.name)
                parts[field] = part.astype(dtype, copy=False)
        return cls(dims=rank_dims, tp_rank=tp_rank, tp_size=tp_size, **parts)

    @property
    def dtype(self) -> np.dtype:
        return self.kv_b_proj.dtype

    @property
    def w_uk(self) -> Any:
        """`[N, P, L]`, a view of `kv_b_proj`: absorbs a query, ql_nope[n] = q_nope[n] @ w_uk[n]."""
        return self._heads()[:, : self.dims.P]

    @property
    def w_uv(self) -> Any:
        """`[N, V, L]`, a view of `kv_b_proj`: an attended latent's value, latent[n] @ w_uv[n].T."""
        return self._heads()[:, self.dims.P :]

    def _heads(self) -> Any:
        dims = self.dims
        return self.kv_b_proj.reshape(dims.N, dims.P + dims.V, dims.L)

    def to(self, xp: ModuleType) -> MLAWeights:
        """The same weights on the GPU that is current, for `xp` CuPy, or on the CPU, for NumPy.

        What is there already is shared.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        held = {name: value for name, value in values.items() if arrays.is_array(value)}
        if xp is np:
            held = {n: value.get() if arrays.is_gpu(value) else value for n, value in held.items()}
            return replace(self, **held)
        uploaded = {n: xp.asarray(value, blocking=True) for n, value in held.items()}
        return replace(self, **uploaded)


def random_weights(
    dims: MLADims,
    dtype: Any = "float32",
    *,
    output_gate: bool = False,
    bias: bool = False,
    seed: int = 0,
    xp: ModuleType = np,
) -> dict[str, Any]:
    """A state dict of normal random weights, which `MLAWeights.load` takes.

    Projections are scaled by `in ** -0.5`, so that they keep the size of what they project; norm
    weights spread by 0.1 around 1, biases by 0.1 around 0.

    Args:
        dims: of the whole model.
        dtype: float32, float16 or bfloat16, or its name.
        output_gate: with ``g_proj.weight``.
        bias: with the biases of ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``.
        seed: of the generator.
        xp: NumPy, or CuPy, which draws them on the current GPU.
    """
    dtype = require.named_dtype(dtype, "dtype", require.FLOATS)
    rng = xp.random.default_rng(seed)
    weights = {}
    for tensor in layer_layout(dims, output_gate).values():
        if tensor.is_optional and not bias:
            continue
        values = rng.standard_normal(tensor.shape, dtype=np.float32)
        values *= np.float32(tensor.shape[1] ** -0.5 if tensor.is_projection else 0.1)
        if tensor.is_norm:
            values += np.float32(1)
        weights[tensor.name] = values.astype(dtype, copy=False)
    return weights


def _rank_dims(dims: Any, tp_rank: Any, tp_size: Any) -> MLADims:
    if not isinstance(dims, MLADims):
        raise TypeError(f"dims is {type(dims).__name__}, expected MLADims")
    size = require.integer(tp_size, "tp_size", 1)
    if require.integer(tp_rank, "tp_rank") >= size:
        raise ValueError(f"tp_rank is {tp_rank}, expected less than tp_size, {size}")
    if dims.N % size:
        raise ValueError(f"tp_size is {size}, expected a divisor of the {dims.N} heads")
    return dims.shard_heads(size)
