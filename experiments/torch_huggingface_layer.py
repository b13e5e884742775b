"""The layer as Hugging Face's transformers has it: `DeepseekV3Attention`, keys and values whole."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from experiments.layer_problems import YARN, Inputs, Problem
from sandbox import arrays

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
"""What `forward` calls the cache, from transformers 5.24 back to 4.5x."""


def unavailable(problem: Problem) -> str | None:
    """Why transformers cannot take the problem, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers"
    if not problem.rotates:
        return "transformers' DeepseekV3Attention has no form without RoPE"
    if problem.gate:
        return "transformers' DeepseekV3Attention has no output gate"
    return None


def estimated_bytes(problem: Problem) -> int:
    """GPU memory beside weights and inputs: latents, projected keys and values, and a mask."""
    dims, shape = problem.dims, problem.shape
    item = arrays.DTYPES[problem.dtype].itemsize
    keys = shape.requests * (shape.context + shape.tokens)
    projected = 2 * dims.P + dims.R + 2 * dims.V  # of values SDPA may want a copy
    masked = shape.tokens > 1 and shape.context
    mask = (1 + item) * shape.tokens * (shape.context + shape.tokens) if masked else 0
    queries = shape.new_tokens * dims.N * 2 * (dims.qk_head_dim + dims.V)
    return item * (keys * (dims.E + dims.N * projected) + queries) + mask


class ContextCache:
    """A cache of one layer that holds the contexts; `update` adds the new tokens after them.

    Newer versions of transformers keep latents and keys, `[B, 1, T, L]` and `[B, 1, T, R]`, and
    project them at every step; older ones keep what is projected, `[B, N, T, P + R]` and
    `[B, N, T, V]`. Which, the first update shows.
    """

    def __init__(self, inputs: Inputs, module: torch.nn.Module) -> None:
        self._inputs, self._module = inputs, module
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def keeps(self) -> str:
        """What the version keeps, in words, once a step has run."""
        latent = self._held is None or self._held[0].shape[1] == 1
        return "latents" if latent else "projected keys and values"

    def update(
        self, first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts of all tokens, contexts first."""
        shape = self._inputs.problem.shape
        if self._held is None:
            keys = shape.context + shape.tokens
            self._held = tuple(
                part.new_zeros(*part.shape[:2], keys, part.shape[3]) for part in (first, second)
            )
            for request in range(shape.requests):
                self._fill(request)
        for held, new in zip(self._held, (first, second)):
            held[:, :, shape.context :] = new
        return self._held

    def _fill(self, request: int) -> None:
        """The context of a request, in the order of columns that transformers' rotation leaves:
        first those of all pairs' first, then those of their second."""
        dims, context = self._inputs.problem.dims, self._inputs.problem.shape.context
        rows = arrays.to_torch(self._inputs.context(request)).to(self._held[0].dtype)
        kv_c, k_pe = rows.split([dims.L, dims.R], dim=-1)
        k_pe = torch.cat([k_pe[:, 0::2], k_pe[:, 1::2]], dim=-1)
        first, second = kv_c[None], k_pe[None]
        if self._held[0].shape[1] != 1:
            kv = self._module.kv_b_proj(kv_c).view(context, dims.N, dims.P + dims.V).transpose(0, 1)
            k_nope, second = kv.split([dims.P, dims.V], dim=-1)
            first = torch.cat([k_nope, k_pe.expand(dims.N, -1, -1)], dim=-1)
        for held, part in zip(self._held, (first, second)):
            held[request, :, :context] = part


def attention_module(inputs: Inputs) -> torch.nn.Module:
    """`DeepseekV3Attention` over the same memory as the inputs' weights."""
    import transformers
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    dims = inputs.problem.dims
    rope = {
        "rope_type": "yarn",
        "original_max_position_embeddings": YARN["original_max_positions"],
        **{name: YARN[name] for name in ("factor", "beta_fast", "beta_slow")},
        **{name: YARN[name] for name in ("mscale", "mscale_all_dim")},
    }
    if int(transformers.__version__.partition(".")[0]) >= 5:
        settings = {"rope_parameters": {**rope, "rope_theta": YARN["theta"]}}
    else:
        settings = {"rope_scaling": rope, "rope_theta": YARN["theta"]}
    config = transformers.DeepseekV3Config(
        hidden_size=dims.H,
        num_attention_heads=dims.N,
        num_key_value_heads=dims.N,
        q_lora_rank=dims.q_lora_rank,
        kv_lora_rank=dims.L,
        qk_nope_head_dim=dims.P,
        qk_rope_head_dim=dims.R,
        v_head_dim=dims.V,
        max_position_embeddings=int(YARN["factor"] * YARN["original_max_positions"]),
        attention_bias=False,
        rope_interleave=True,
        attn_implementation="sdpa",
        **settings,
    )
    with torch.device("meta"):
        module = deepseek.DeepseekV3Attention(config, layer_idx=0)
    weights = {name: arrays.to_torch(weight) for name, weight in inputs.weights.items()}
    module.load_state_dict(weights, assign=True)
    return module.eval().requires_grad_(False)


def huggingface_step(
    inputs: Inputs,
) -> tuple[Callable[[], torch.Tensor], Callable[[], str]]:
    """One step of the module on torch's current stream, with result `[T, H]`, and words on it.

    The rotation is that of the inputs' table, rounded to the layer's dtype as transformers does.
    """
    problem, shape = inputs.problem, inputs.problem.shape
    module = attention_module(inputs)
    parameters = inspect.signature(module.forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    cache = ContextCache(inputs, module)
    hidden = arrays.to_torch(inputs.hidden).view(shape.requests, shape.tokens, -1)
    table = arrays.to_torch(inputs.xp.asarray(inputs.rope.cos_sin[inputs.positions]))
    table = table.view(shape.requests, shape.tokens, problem.dims.R).to(hidden.dtype)
    cos, sin = (torch.cat([part, part], dim=-1) for part in table.chunk(2, dim=-1))
    mask = None
    if shape.tokens > 1 and shape.context:
        keys = shape.context + shape.tokens
        mask = torch.ones(shape.tokens, keys, dtype=torch.bool, device=hidden.device)
        mask = mask.tril(shape.context)[None, None]

    def step() -> torch.Tensor:
        with torch.no_grad():
            out = module(
                hidden, position_embeddings=(cos, sin), attention_mask=mask, **{name: cache}
            )[0]
        return out.view(shape.new_tokens, -1)

    return step, lambda: f"transformers {version('transformers')}, SDPA; it caches {cache.keeps}"
