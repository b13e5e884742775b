"""The layer in plain torch, compiled, over a contiguous latent cache: what a page of code gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from experiments.layer_problems import Inputs, Problem
from sandbox import arrays
from sandbox.kernels.attention.torch_prefill_requests import by_sdpa
from sandbox.layers.model_config import NORM_EPS

ROWS = 64
"""The cache of a request has whole multiples of so many rows, for products on tensor cores."""


def estimated_bytes(problem: Problem) -> int:
    """GPU memory beside weights and inputs: the cache, and the largest arrays of a step."""
    dims, shape = problem.dims, problem.shape
    item = arrays.DTYPES[problem.dtype].itemsize
    keys = _padded(shape.context + shape.tokens)
    cache = shape.requests * keys * dims.E * item
    if shape.phase == "decode":
        return cache + 2 * item * shape.requests * dims.N * keys
    heads = dims.N * (2 * dims.P + dims.R + dims.V)
    queries = shape.tokens * dims.N * (2 * dims.qk_head_dim + 4 * dims.V)
    return cache + item * (keys * heads + queries)


def _padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


class TorchLayer(torch.nn.Module):
    """MLA by matrix products: absorbed in decode, over heads by torch's SDPA in prefill.

    It shares the weights' memory. Each method that computes is compiled by itself; between them
    stand what no compiler improves, the write of the new rows and SDPA.
    """

    def __init__(self, inputs: Inputs, compiled: bool, mode: str | None) -> None:
        super().__init__()
        self.problem, self.dims = inputs.problem, inputs.problem.dims
        self.scale = inputs.softmax_scale
        for name, weight in inputs.weights.items():
            self.register_buffer(name.removesuffix(".weight"), arrays.to_torch(weight))
        self.w_uk, self.w_uv = self.kv_b_proj.view(
            self.dims.N, self.dims.P + self.dims.V, self.dims.L
        ).split([self.dims.P, self.dims.V], dim=1)
        self.cos = self.sin = None
        if inputs.rope is not None:
            table = arrays.to_torch(inputs.xp.asarray(inputs.rope.cos_sin[inputs.positions]))
            self.cos, self.sin = table.chunk(2, dim=-1)
        if compiled:
            torch._dynamo.reset()  # shapes of other problems count towards its limit
            for name in ("project", "attend_latent", "expand", "merge", "finish"):
                method = getattr(self, name)
                setattr(self, name, torch.compile(method, dynamic=False, mode=mode))

    def forward(self, hidden: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """`hidden` `[T, H]` of all requests; `cache` `[B, rows, E]`, contexts at the front."""
        shape = self.problem.shape
        q, row = self.project(hidden)
        end = shape.context + shape.tokens
        cache[:, shape.context : end] = row.view(shape.requests, shape.tokens, -1)
        if shape.phase == "decode":
            attended = self.attend_latent(q, cache)
        else:
            attended = self.attend_heads(q, cache[0, :end])
        return self.finish(hidden, attended)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[T, N, P + R]` and latent rows `[T, E]`, rotated."""
        dims = self.dims
        source, weight = hidden, getattr(self, "q_proj", None)
        if dims.q_lora_rank is not None:
            source = _normed(linear(hidden, self.q_a_proj), self.q_a_layernorm)
            weight = self.q_b_proj
        q = linear(source, weight).view(-1, dims.N, dims.qk_head_dim)
        kv_c, k_pe = linear(hidden, self.kv_a_proj_with_mqa).split([dims.L, dims.R], dim=-1)
        kv_c = _normed(kv_c, self.kv_a_layernorm)
        if self.cos is None:
            return q, torch.cat([kv_c, k_pe], dim=-1)
        q_nope, q_pe = q.split([dims.P, dims.R], dim=-1)
        q_pe = _rotated(q_pe, self.cos[:, None], self.sin[:, None])
        k_pe = _rotated(k_pe, self.cos, self.sin)
        return torch.cat([q_nope, q_pe], dim=-1), torch.cat([kv_c, k_pe], dim=-1)

    def attend_latent(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """All heads of a request share its rows: two products with a matrix of `N` rows."""
        dims = self.dims
        q_nope, q_pe = q.split([dims.P, dims.R], dim=-1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        query = torch.cat([absorbed, q_pe], dim=-1)
        scores = torch.bmm(query, cache.transpose(1, 2)).float() * self.scale
        beyond = torch.arange(cache.shape[1], device=cache.device) > self.problem.shape.context
        weights = scores.masked_fill(beyond, -torch.inf).softmax(dim=-1).to(cache.dtype)
        latent = torch.bmm(weights, cache[..., : dims.L])
        return torch.bmm(latent.transpose(0, 1), self.w_uv.transpose(1, 2)).transpose(0, 1)

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[K, N, P + R]` and values `[K, N, V]` of latent rows."""
        dims = self.dims
        kv_c, k_pe = rows.split([dims.L, dims.R], dim=-1)
        kv = linear(kv_c, self.kv_b_proj).view(-1, dims.N, dims.P + dims.V)
        k_nope, v = kv.split([dims.P, dims.V], dim=-1)
        return torch.cat([k_nope, k_pe[:, None].expand(-1, dims.N, -1)], dim=-1), v

    def attend_heads(self, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """SDPA of the queries over all rows, the last of which are their own: `[T, N, V]`.

        cuDNN has no causal mask for fewer queries than keys: context and new tokens come apart,
        and are merged. Elsewhere flash attention does both, with values as wide as keys.
        """
        context = self.problem.shape.context
        q, k, v = (part.transpose(0, 1) for part in (q, *self.expand(rows)))
        if not (q.is_cuda and _by_cudnn(q, k, v)):
            return self._attend_flash(q, k, v).transpose(0, 1)
        new = by_sdpa(q, k[:, context:], v[:, context:], self.scale, True)
        if not context:
            return new[0].transpose(0, 1)
        old = by_sdpa(q, k[:, :context], v[:, :context], self.scale, False)
        return self.merge(*new, *old).transpose(0, 1)

    def _attend_flash(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.bias import causal_lower_right

        wide = max(q.shape[-1], v.shape[-1])
        q, k, wide_v = (pad(part, (0, wide - part.shape[-1]))[None] for part in (q, k, v))
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return scaled_dot_product_attention(q, k, wide_v, mask, scale=self.scale)[
            0, ..., : v.shape[-1]
        ]

    def merge(
        self, one: torch.Tensor, one_lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
    ) -> torch.Tensor:
        """Of two softmaxes over different keys, by their LSEs."""
        share = torch.sigmoid(one_lse - other_lse)[..., None]
        return (one.float() * share + other.float() * (1 - share)).to(one.dtype)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        attended = attended.reshape(len(hidden), -1)
        if self.problem.gate:
            attended = attended * torch.sigmoid(linear(hidden, self.g_proj))
        return linear(attended, self.o_proj)


def _by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    problem = torch.backends.cuda.SDPAParams(q[None], k[None], v[None], None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(problem)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + NORM_EPS)
    return (values * scale * weight.float()).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def contiguous_cache(inputs: Inputs) -> torch.Tensor:
    """`[B, rows, E]` of the layer's dtype: the contexts as the paged cache restores to."""
    problem = inputs.problem
    shape, dims = problem.shape, problem.dims
    size = (shape.requests, _padded(shape.context + shape.tokens), dims.E)
    cache = inputs.xp.zeros(size, arrays.DTYPES[problem.dtype])
    for request in range(shape.requests):
        cache[request, : shape.context] = inputs.context(request)
    return arrays.to_torch(cache)


def torch_step(
    inputs: Inputs, compiled: bool, mode: str | None = None
) -> tuple[Callable[[], torch.Tensor], Callable[[], str]]:
    """One step of `TorchLayer` on torch's current stream, with result `[T, H]`, and words on it."""
    layer, cache = TorchLayer(inputs, compiled, mode), contiguous_cache(inputs)
    hidden = arrays.to_torch(inputs.hidden)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return layer(hidden, cache)

    how = f"torch.compile, mode {mode or 'default'}" if compiled else "not compiled"
    note = f"torch {torch.__version__}, {how}; its contiguous cache is restored beforehand"
    return step, lambda: note


def captured(step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph's replay of the step, and where it leaves its result.

    The graph has memory of its own, which no later tensor comes to lie in.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph.replay, out


@contextmanager
def own_memory() -> Iterator[Any]:
    """What torch allocates inside comes from a pool that lasts as long as the object is kept.

    For a graph that another library captures: its temporary arrays stay its own.
    """
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        yield pool


def peak_bytes(step: Callable[[], torch.Tensor]) -> int:
    """Memory that one step takes from torch beyond what was taken before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def empty_pools() -> None:
    """Give back what torch's allocator holds and nobody uses."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
