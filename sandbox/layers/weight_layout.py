"""The tensors of an MLA layer in a checkpoint: names, shapes, and which part is a rank's.

Names and layout are those of Hugging Face's DeepseekV3Attention: a projection is `[out, in]`. Heads
lie one after the other, so that a rank's are consecutive rows of the projections to heads, and
consecutive columns of `o_proj`, the projection from them. What is not of a head, every rank has
whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.dims import MLADims

_HEAD_KEYS, _HEAD_KEYS_AND_VALUES, _HEAD_VALUES = "N * (P + R)", "N * (P + V)", "N * V"

# field of MLAWeights -> (name in a checkpoint, each axis in letters)
_FULL_RANK_Q = {"q_proj": ("q_proj.weight", _HEAD_KEYS, "H")}
_LATENT_Q = {
    "q_a_proj": ("q_a_proj.weight", "Lq", "H"),
    "q_a_bias": ("q_a_proj.bias", "Lq"),
    "q_a_layernorm": ("q_a_layernorm.weight", "Lq"),
    "q_b_proj": ("q_b_proj.weight", _HEAD_KEYS, "Lq"),
}
_LATENT_KV_AND_OUTPUT = {
    "kv_a_proj": ("kv_a_proj_with_mqa.weight", "L + R", "H"),
    "kv_a_bias": ("kv_a_proj_with_mqa.bias", "L + R"),
    "kv_a_layernorm": ("kv_a_layernorm.weight", "L"),
    "kv_b_proj": ("kv_b_proj.weight", _HEAD_KEYS_AND_VALUES, "L"),
    "o_proj": ("o_proj.weight", "H", _HEAD_VALUES),
    "o_bias": ("o_proj.bias", "H"),
}
_OUTPUT_GATE = {"g_proj": ("g_proj.weight", _HEAD_VALUES, "H")}


@dataclass(frozen=True)
class TensorLayout:
    """One tensor of the whole model.

    Attributes:
        name: in a checkpoint, with the layer's prefix.
        axes: each axis in letters, such as ``("N * V", "H")``.
        shape: the same in numbers.
    """

    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def is_projection(self) -> bool:
        return len(self.axes) == 2

    @property
    def is_norm(self) -> bool:
        return self.name.endswith("layernorm.weight")

    @property
    def is_optional(self) -> bool:
        return self.name.endswith(".bias")

    def of_rank(self, rank: int, size: int) -> tuple[slice, ...]:
        """The part of rank `rank` among `size`, which divides the heads: a slice for each axis."""
        return tuple(
            slice(width // size * rank, width // size * (rank + 1))
            if letters.startswith("N")
            else slice(0, width)
            for letters, width in zip(self.axes, self.shape)
        )


def layer_layout(dims: MLADims, output_gate: bool, prefix: str = "") -> dict[str, TensorLayout]:
    """The tensors that a layer of these dims, the whole model's, may have: by field of MLAWeights.

    All but biases must be there.
    """
    widths = {
        "H": dims.H,
        "Lq": dims.q_lora_rank,
        "L": dims.L,
        "L + R": dims.E,
        _HEAD_KEYS: dims.N * dims.qk_head_dim,
        _HEAD_KEYS_AND_VALUES: dims.N * (dims.P + dims.V),
        _HEAD_VALUES: dims.N * dims.V,
    }
    tensors = _FULL_RANK_Q if dims.q_lora_rank is None else _LATENT_Q
    tensors = tensors | _LATENT_KV_AND_OUTPUT | (_OUTPUT_GATE if output_gate else {})
    return {
        field: TensorLayout(prefix + name, tuple(axes), tuple(widths[letters] for letters in axes))
        for field, (name, *axes) in tensors.items()
    }
