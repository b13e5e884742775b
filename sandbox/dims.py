"""Dimensions of a Multi-head Latent Attention model, and the named presets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MLADims:
    """Widths of one MLA layer on one rank; letters as in the README's vocabulary.

    Args:
        num_heads: `N`, attention heads on this rank.
        hidden_size: `H`, model width.
        kv_lora_rank: `L`, width of the latent `kv_c`.
        qk_nope_head_dim: `P`, head width without RoPE.
        qk_rope_head_dim: `R`, width of the shared key `k_pe`; even, or 0 for a model without it.
        v_head_dim: `V`, value head width.
        q_lora_rank: `Lq`, latent width of q, or None for a full-rank q projection.
        rope: whether the `R` columns are rotated; False is NoPE with `k_pe` kept as it is.

    Raises:
        ValueError: a width is not a positive integer, or `R` is odd or negative.
    """

    num_heads: int
    hidden_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope: bool = True

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "hidden_size",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
        ):
            if not isinstance(getattr(self, name), int) or getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected a positive integer")
        if self.q_lora_rank is not None and self.q_lora_rank <= 0:
            raise ValueError(f"q_lora_rank is {self.q_lora_rank}, expected None or positive")
        if self.qk_rope_head_dim < 0 or self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, expected an even number >= 0: "
                "RoPE rotates pairs"
            )

    @property
    def N(self) -> int:
        return self.num_heads

    @property
    def H(self) -> int:
        return self.hidden_size

    @property
    def L(self) -> int:
        return self.kv_lora_rank

    @property
    def P(self) -> int:
        return self.qk_nope_head_dim

    @property
    def R(self) -> int:
        return self.qk_rope_head_dim

    @property
    def V(self) -> int:
        return self.v_head_dim

    @property
    def E(self) -> int:
        """Elements of one row of the latent cache, `L + R`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a full query or key head, `P + R`."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """`(P + R) ** -0.5`; a YaRN model multiplies it by `mscale ** 2`. Never `E ** -0.5`."""
        return 1.0 / math.sqrt(self.qk_head_dim)

    def shard_heads(self, tensor_parallel_size: int) -> MLADims:
        """The same layer with its heads divided over `tensor_parallel_size` ranks."""
        if tensor_parallel_size <= 0 or self.num_heads % tensor_parallel_size:
            raise ValueError(
                f"num_heads {self.num_heads} cannot be divided over {tensor_parallel_size} ranks"
            )
        return replace(self, num_heads=self.num_heads // tensor_parallel_size)


PRESETS: dict[str, MLADims] = {
    "deepseek_v3": MLADims(128, 7168, 512, 128, 64, 128, q_lora_rank=1536),
    "deepseek_v2_lite": MLADims(16, 2048, 512, 128, 64, 128),
    "kimi_k2": MLADims(64, 7168, 512, 128, 64, 128, q_lora_rank=1536),
    "kimi_linear": MLADims(32, 2304, 512, 128, 64, 128, rope=False),
    "tiny": MLADims(3, 56, 40, 24, 8, 16, q_lora_rank=20),
}
