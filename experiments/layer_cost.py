"""What one step of a layer must move and compute, whoever computes it."""

from __future__ import annotations

import math

from experiments.layer_problems import Problem
from sandbox import arrays
from sandbox.kernels.op import Cost
from sandbox.layers.weight_layout import layer_layout


def weight_elements(problem: Problem) -> dict[str, int]:
    """Elements of each weight, by Hugging Face's names."""
    layout = layer_layout(problem.dims, problem.gate).values()
    return {each.name: math.prod(each.shape) for each in layout if not each.is_optional}


def step_cost(problem: Problem) -> Cost:
    """Bytes and FLOPs of a step.

    Bytes: every weight once, the cached rows of all requests once, hidden states in, and out again
    with the new tokens' rows. What goes from one product to the next is not counted: it may stay
    in the L2 cache.

    FLOPs, two for a product and a sum: each projection of the new tokens; in a decode `kv_b_proj`
    is absorbed, `N (P + V) L` a token, and a pair of query and key takes `N (E + L)`; in a prefill
    it projects context and new tokens alike, and a pair takes `N (P + R + V)`.
    """
    dims, shape = problem.dims, problem.shape
    item = arrays.DTYPES[problem.dtype].itemsize
    weights = weight_elements(problem)
    row = problem.format.row_bytes(dims)
    context = shape.requests * shape.context
    hidden = shape.new_tokens * dims.H * item
    read = sum(weights.values()) * item + context * row + hidden
    written = shape.new_tokens * row + hidden
    kv_b = weights["kv_b_proj.weight"]
    projections = sum(count for name, count in weights.items() if "layernorm" not in name) - kv_b
    if shape.phase == "decode":
        projected, pair = shape.new_tokens, dims.N * (dims.E + dims.L)
    else:
        projected, pair = shape.new_tokens + context, dims.N * (dims.qk_head_dim + dims.V)
    products = shape.new_tokens * projections + projected * kv_b + shape.pairs * pair
    return Cost(read, written, 2 * products)


def weight_bytes(problem: Problem) -> int:
    return sum(weight_elements(problem).values()) * arrays.DTYPES[problem.dtype].itemsize
