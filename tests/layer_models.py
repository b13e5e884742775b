"""A model's attention as Hugging Face has it and as a layer, and requests that go through both."""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from sandbox import FORMATS, MLADims
from sandbox.layers import MLALayer, dims_of, rope_of
from sandbox.planner import plan_step

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def config(**changes):
    """A small DeepSeek-V3, all of whose widths differ, with YaRN."""
    sizes = {
        "hidden_size": 56,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 256,
        "rope_interleave": True,
        "attention_bias": False,
        "attn_implementation": "eager",
        "rope_parameters": dict(YARN),
    }
    return DeepseekV3Config(**{**sizes, **changes})


def attention_module(settings, dtype=torch.float32, seed=0):
    """Random weights, norms not all ones."""
    torch.manual_seed(seed)
    module = deepseek.DeepseekV3Attention(settings, layer_idx=0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            spread = 0.1 if value.ndim == 1 else value.shape[-1] ** -0.5
            value.normal_(1.0 if "layernorm" in name else 0.0, spread)
    return module.to(dtype).eval()


@torch.no_grad()
def huggingface(module, settings, hidden):
    """The module's output for whole sequences, causal, from position 0: float32 arrays."""
    outputs = []
    rotary = deepseek.DeepseekV3RotaryEmbedding(settings)
    for sequence in hidden:
        tokens = len(sequence)
        x = sequence[None]
        angles = rotary(x, torch.arange(tokens)[None])
        mask = torch.full((tokens, tokens), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        outputs.append(module(x, angles, mask)[0][0].float().numpy())
    return outputs


@dataclass
class Server:
    """Requests that a layer computes step by step over one paged cache.

    Free pages hold NaN (or the codes of it), and columns of the block table past a request's
    blocks hold ids that no cache has.
    """

    layer: MLALayer
    hidden: list  # of each request, [tokens, H], in the caller's kind
    block_size: int = 4
    blocks: int = 64
    columns: int = 16
    done: list = field(default_factory=list)

    def __post_init__(self):
        self.done = [0] * len(self.hidden)
        fmt = FORMATS[self.layer.cache_format]
        shape = fmt.cache_shape(self.layer.dims, self.blocks, self.block_size)
        self.cache = np.full(shape, 0xFF if fmt.packed else np.nan, fmt.storage)
        rng = np.random.default_rng(7)
        self.table = np.full((len(self.hidden), self.columns), 2_000_000, np.int32)
        ids = rng.permutation(self.blocks)
        for request, sequence in enumerate(self.hidden):
            needed = -(-len(sequence) // self.block_size)
            if self.layer.context_parallel:
                needed = int(self.layer.context_parallel.columns_needed(len(sequence)))
            self.table[request, :needed], ids = ids[:needed], ids[needed:]
        self.outputs = [[] for _ in self.hidden]

    def step(self, query_lens, workspace_rows=None, decode_threshold=1, **options):
        """Compute so many new tokens of each request."""
        plan = plan_step(
            query_lens,
            self.done,
            self.table,
            self.block_size,
            workspace_rows,
            decode_threshold=decode_threshold,
            parallel=self.layer.context_parallel,
            rank=self.layer.collective.rank,
            **options,
        )
        news = [
            sequence[done : done + count]
            for sequence, done, count in zip(self.hidden, self.done, query_lens)
        ]
        ordered = [news[request] for request in plan.order.order]
        hidden = torch.cat(ordered) if isinstance(ordered[0], torch.Tensor) else np.concatenate(ordered)
        out = self.layer(hidden, None, self.cache, plan)
        assert type(out) is type(hidden)
        first = 0
        for request in plan.order.order:
            count = query_lens[request]
            part = out[first : first + count]
            part = part.float().numpy() if isinstance(part, torch.Tensor) else part.astype(np.float32)
            self.outputs[request].append(part)
            self.done[request] += count
            first += count
        return out

    def results(self):
        return [np.concatenate(parts) for parts in self.outputs]


def layer_of(module, settings, **options):
    """The layer over the module's own weights."""
    dims = dims_of(settings)
    assert isinstance(dims, MLADims)
    return MLALayer(dims, module, rope=rope_of(settings, max_positions=256), **options)


def sequences(lengths, width, dtype=torch.float32, seed=1):
    torch.manual_seed(seed)
    return [torch.randn(length, width).to(dtype) for length in lengths]
