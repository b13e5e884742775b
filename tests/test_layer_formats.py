"""The layer over every cache format: exact for what the cache restores, near for what it loses."""

import numpy as np
import pytest
from few_lines import mla
from layer_models import (
    TILED,
    Server,
    assert_close,
    at_once,
    in_chunks,
    put_all,
    rope_for,
    sequences,
    targets,
    token_by_token,
)

from sandbox import FORMATS, MLADims, choose_k_scale
from sandbox.layers import MLALayer, random_weights

DIMS = MLADims(3, 56, 40, 24, 8, 16, q_lora_rank=20)

OWN_ERROR = {
    "float32": 3e-6,
    "fp8_e4m3": 0.15,
    "fp8_e5m2": 0.35,
    "fp8_ds_mla": 0.15,
    "int8_per_token": 0.05,
    "int4_per_token": 0.9,
}
"""Of the layer's output over its root mean square, largest element."""


def problem(name):
    """Dims, weights, sequences, rope and the format's options."""
    dims = TILED if name == "fp8_ds_mla" else DIMS
    weights, rope = random_weights(dims, seed=3), rope_for(dims)
    hidden = sequences()
    options = {}
    if FORMATS[name].needs_scale:
        rows = [oracle(dims, weights, rope, one)[1] for one in hidden]
        latents = np.concatenate(rows).astype(np.float32)
        options["k_scale"] = choose_k_scale(latents[:, : dims.L], latents[:, dims.L :], name)
    return dims, weights, hidden, rope, options


def oracle(dims, weights, rope, hidden, restore=None):
    scale = dims.softmax_scale * rope.softmax_factor
    return mla(weights, dims, hidden, scale=scale, cos_sin=rope.cos_sin, restore=restore)


@pytest.mark.parametrize("name", OWN_ERROR)
def test_decodes_are_exact_for_what_the_cache_restores(name):
    """Token by token, every key is read from the cache, the token's own too."""
    dims, weights, hidden, rope, options = problem(name)
    server = Server(MLALayer(dims, weights, rope=rope, cache_format=name, **options), hidden)
    token_by_token(server)
    fmt = FORMATS[name]

    def restore(rows):
        coded = fmt.encode(rows.astype(np.float32), dims, **options)
        return fmt.decode(coded, dims, **options)

    want = [oracle(dims, weights, rope, one, restore)[0] for one in hidden]
    # A latent may be a float32 ulp from the oracle's, and then round to the next code.
    bound = 3e-6 if name == "float32" else 0.02
    assert_close(server.results(), want, bound)
    errors = [abs(got - exact) for got, exact in zip(server.results(), want)]
    assert np.median(np.concatenate(errors)) < 1e-4


@targets
@pytest.mark.parametrize("name", OWN_ERROR)
def test_prefills_and_decodes_are_within_the_formats_error(target, name):
    dims, weights, hidden, rope, options = problem(name)
    want = [oracle(dims, weights, rope, one)[0] for one in hidden]
    weights = put_all(weights, target)
    layer = MLALayer(dims, weights, rope=rope, cache_format=name, **options)
    for schedule in (at_once, in_chunks):
        server = Server(layer, hidden, target, workspace_rows=8)
        schedule(server)
        bound = 3e-6 if schedule is at_once else OWN_ERROR[name]  # new tokens see each other whole
        assert_close(server.results(), want, bound)


@pytest.mark.parametrize("name", OWN_ERROR)
def test_chunks_do_not_change_what_a_format_gives(name):
    """Restoring twice, or never, would show where one chunk becomes many."""
    dims, weights, hidden, rope, options = problem(name)
    results = []
    for rows in (4, 16, None):
        layer = MLALayer(dims, weights, rope=rope, cache_format=name, **options)
        server = Server(layer, hidden, workspace_rows=rows)
        server.step([8, 14, 5])
        server.step([3, 15, 2])
        results.append(server.results())
    assert_close(results[0], results[2], 3e-6)
    assert_close(results[1], results[2], 3e-6)


@targets
@pytest.mark.parametrize("name", ["float32", "fp8_e4m3", "int8_per_token"])
def test_queries_in_e4m3(target, name):
    """Prefills and decodes with codes: within the error of 8-bit q, k and v, for any chunks."""
    dims, weights, hidden, rope, options = problem(name)
    want = [oracle(dims, weights, rope, one)[0] for one in hidden]
    weights = put_all(weights, target)
    options |= {"prefill_descales": (0.011, 0.013, 0.017), "decode_q_descale": 0.03}
    layer = MLALayer(dims, weights, rope=rope, cache_format=name, **options)
    for rows in (8, None):
        server = Server(layer, hidden, target, workspace_rows=rows)
        in_chunks(server)
        assert_close(server.results(), want, 0.35)
        errors = [abs(got - exact) for got, exact in zip(server.results(), want)]
        assert np.median(np.concatenate(errors)) > 1e-4  # they are codes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_caches_of_sixteen_bits(dtype):
    weights, rope = random_weights(DIMS, dtype, seed=3), rope_for(DIMS)
    hidden = sequences(dtype=weights["o_proj.weight"].dtype)
    exact = {key: value.astype(np.float32) for key, value in weights.items()}
    want = [oracle(DIMS, exact, rope, one.astype(np.float32))[0] for one in hidden]
    for schedule in (at_once, in_chunks, token_by_token):
        server = Server(MLALayer(DIMS, weights, rope=rope), hidden, workspace_rows=8)
        schedule(server)
        assert_close(server.results(), want, 0.01 if dtype == "float16" else 0.06)
