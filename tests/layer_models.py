"""A model's attention as Hugging Face has it and as a layer, and requests that go through both."""

import contextlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from sandbox import FORMATS, PRESETS, MLADims, arrays
from sandbox.layers import (
    DecodeSteps,
    MLALayer,
    MLAWeights,
    Rope,
    dims_of,
    random_weights,
    rope_of,
)
from sandbox.planner import plan_step

H = 56
LENGTHS = (11, 29, 7)
"""Tokens of the requests that most tests serve."""

TINY = PRESETS["tiny"]
ROPE = Rope.default(TINY.R, 64)
TILED = MLADims(2, 56, 512, 24, 64, 16, q_lora_rank=20)
"""The least that the layout of 656 bytes takes."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


torch_on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
TARGETS = [
    "numpy",
    "torch",
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch_cuda", marks=torch_on_gpu),
]
targets = pytest.mark.parametrize("target", TARGETS)
"""Whose arrays a caller has, and where: each test of a layer is one on all of them."""


def put(array, target):
    """A NumPy array, bf16 included, as `target` has it."""
    if target == "numpy":
        return array
    if target == "cupy":
        import cupy

        return cupy.asarray(array)
    tensor = arrays.to_torch(np.ascontiguousarray(array))
    return tensor.cuda() if target == "torch_cuda" else tensor


def put_all(weights, target):
    """Weights by name, NumPy's, as CuPy arrays where `target` is on a GPU."""
    on_gpu = target in ("cupy", "torch_cuda")
    return {name: put(value, "cupy" if on_gpu else "numpy") for name, value in weights.items()}


def back(array):
    """An array of any target as NumPy has it."""
    if isinstance(array, torch.Tensor):
        array = arrays.adopt(array.detach().cpu())
    return array if isinstance(array, np.ndarray) else array.get()


def config(**changes):
    """A small DeepSeek-V3, all of whose widths differ, with YaRN."""
    sizes = {
        "hidden_size": H,
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
    """Random weights, norms and biases included."""
    torch.manual_seed(seed)
    module = deepseek.DeepseekV3Attention(settings, layer_idx=0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            spread = 0.1 if value.ndim == 1 else value.shape[-1] ** -0.5
            value.normal_(1.0 if "layernorm" in name else 0.0, spread)
    return module.to(dtype).eval()


@torch.no_grad()
def huggingface(module, settings, sequences):
    """The module's outputs for whole sequences, causal, from position 0: in float32 arithmetic."""
    exact = attention_module(settings)
    exact.load_state_dict(module.state_dict())
    rotary = deepseek.DeepseekV3RotaryEmbedding(settings)
    outputs = []
    for sequence in sequences:
        hidden = torch.from_numpy(sequence.astype(np.float32))[None]
        tokens = hidden.shape[1]
        angles = rotary(hidden, torch.arange(tokens)[None])
        mask = torch.full((tokens, tokens), float("-inf")).triu(1)[None, None]
        outputs.append(exact(hidden, angles, mask)[0][0].numpy())
    return outputs


def sequences(lengths=LENGTHS, width=H, dtype=np.float32, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, width), np.float32).astype(dtype) for n in lengths]


def layer_of(module, settings, target="numpy", **options):
    """The layer over the module's own weights, on the device of `target`."""
    dims = dims_of(settings)
    ranks = {name: options[name] for name in ("tp_rank", "tp_size") if name in options}
    weights = MLAWeights.load(module, dims, **ranks)
    if target in ("cupy", "torch_cuda"):
        import cupy

        weights = weights.to(cupy)
    return MLALayer(dims, weights, rope=rope_of(settings, max_positions=256), **options)


def rope_for(dims):
    return Rope.yarn(dims.R, factor=4.0, original_max_positions=64, mscale_all_dim=0.7)


def tiny(weights=None, **options):
    """A layer of random weights for 64 positions."""
    weights = random_weights(TINY) if weights is None else weights
    return MLALayer(TINY, weights, **{"rope": ROPE, **options})


@cache
def example(name="yarn", dtype="float32"):
    """A module, its settings, sequences and what the module makes of them: computed once."""
    changes = {
        "yarn": {},
        "plain rope, full-rank q": {
            "q_lora_rank": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
        "biases, half-split rope": {"attention_bias": True, "rope_interleave": False},
    }[name]
    settings = config(**changes)
    module = attention_module(settings, getattr(torch, dtype))
    hidden = sequences(dtype=arrays.DTYPES[dtype])
    return module, settings, hidden, huggingface(module, settings, hidden)


@dataclass
class Server:
    """Requests that a layer computes step by step over one paged cache.

    Free pages hold NaN, or the codes of it, and columns of the block table past a request's blocks
    hold ids that no cache has.
    """

    layer: MLALayer
    hidden: list  # of each request, NumPy [tokens, H]
    target: str = "numpy"
    block_size: int = 4
    blocks: int = 64
    columns: int = 16
    workspace_rows: int | None = None
    done: list = field(default_factory=list)

    def __post_init__(self):
        self.done = [0] * len(self.hidden)
        self.outputs = [[np.empty((0, H), np.float32)] for _ in self.hidden]
        fmt = FORMATS[self.layer.cache_format]
        shape = fmt.cache_shape(self.layer.dims, self.blocks, self.block_size)
        self.cache = put(np.full(shape, 0xFF if fmt.packed else np.nan, fmt.storage), self.target)
        self.table = np.full((len(self.hidden), self.columns), 2_000_000, np.int32)
        ids = np.random.default_rng(7).permutation(self.blocks)
        parallel = self.layer.context_parallel
        for request, sequence in enumerate(self.hidden):
            rows = len(sequence)
            if parallel is not None:
                rows = int(parallel.local_lens(rows, 0))  # no rank has more than the first
            needed = -(-rows // self.block_size)
            self.table[request, :needed], ids = ids[:needed], ids[needed:]

    def plan(self, query_lens, **options):
        options = {"workspace_rows": self.workspace_rows, **options}
        return plan_step(
            query_lens,
            self.done,
            self.table,
            self.block_size,
            parallel=self.layer.context_parallel,
            rank=self.layer.collective.rank,
            **options,
        )

    def next_tokens(self, query_lens, plan):
        """Hidden states of a step in the order of its batch."""
        parts = [
            self.hidden[request][self.done[request] : self.done[request] + query_lens[request]]
            for request in plan.order.order
        ]
        return np.concatenate(parts)

    def step(self, query_lens, **options):
        """Compute so many new tokens of each request."""
        plan = self.plan(query_lens, **options)
        hidden = put(self.next_tokens(query_lens, plan), self.target)
        out = self.layer(hidden, None, self.cache, plan)
        assert type(out) is type(hidden)
        assert out.shape == hidden.shape
        self.keep(query_lens, plan, back(out))

    def keep(self, query_lens, plan, out):
        first = 0
        for request in plan.order.order.tolist():
            count = query_lens[request]
            self.outputs[request].append(out[first : first + count].astype(np.float32))
            self.done[request] += count
            first += count

    def results(self):
        return [np.concatenate(parts) for parts in self.outputs]


def at_once(server):
    server.step(list(map(len, server.hidden)))


def in_chunks(server):
    """Prefills over context in chunks, mixed with decodes of one token and of several."""
    server.step([4, 9, 0])
    server.step([1, 8, 3])
    server.step([1, 1, 3])
    server.step([3, 2, 1], decode_threshold=3)
    server.step([2, 9, 0])
    while server.done != list(map(len, server.hidden)):
        one_token(server)


def one_token(server):
    left = [len(sequence) - done for sequence, done in zip(server.hidden, server.done)]
    server.step([min(1, count) for count in left])


def token_by_token(server):
    for _ in range(max(map(len, server.hidden))):
        one_token(server)


SCHEDULES = [at_once, in_chunks, token_by_token]


def assert_close(results, expected, bound):
    """The largest error over the root mean square of what is expected, request by request."""
    for request, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got.shape == want.shape
        error = np.abs(got - want).max() / np.sqrt(np.mean(want.astype(np.float64) ** 2))
        assert error < bound, f"request {request}: error {error} of its rms"


def decode_step(server, like, requests, query_len=1, **options):
    return DecodeSteps(
        requests,
        query_len,
        columns=server.columns,
        block_size=server.block_size,
        num_blocks=server.blocks,
        like=like,
        **options,
    )


@contextlib.contextmanager
def unchanged(*held):
    """The arrays are as they were, bit for bit."""
    before = [back(array).tobytes() for array in held]
    yield
    assert [back(array).tobytes() for array in held] == before
