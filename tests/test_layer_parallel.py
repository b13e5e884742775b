"""Tensor and context parallelism in one process: the ranks together are the layer."""

import numpy as np
import pytest
from few_lines import mla
from layer_models import LENGTHS, Server, assert_close, put_all, sequences, targets

from sandbox import MLADims
from sandbox.layers import InProcess, MLALayer, Rope, random_weights
from sandbox.planner import ContextParallel

DIMS = MLADims(12, 56, 40, 24, 8, 16, q_lora_rank=20)
BOUND = 5e-6


def problem():
    weights = random_weights(DIMS, output_gate=True, bias=True, seed=6)
    for name in ("q_a_proj.bias", "kv_a_proj_with_mqa.bias"):
        del weights[name]
    rope = Rope.yarn(DIMS.R, factor=4.0, original_max_positions=64)
    hidden = sequences()
    scale = DIMS.softmax_scale * rope.softmax_factor
    want = [
        mla(weights, DIMS, one, scale=scale, cos_sin=rope.cos_sin, gate=True)[0]
        + weights["o_proj.bias"]
        for one in hidden
    ]
    return weights, rope, hidden, want


def serve(server, unit):
    """Prefills over context of several chunks, decodes of one token and of several."""
    server.step([5, 9, 0], workspace_rows=4 * unit)
    server.step([3, 8, 4], workspace_rows=2 * unit)
    server.step([1, 7, 1], workspace_rows=4 * unit)
    server.step([2, 3, 2], decode_threshold=3)
    server.step([0, 1, 0])
    server.step([0, 1, 0])
    assert server.done == list(LENGTHS)
    return server.results()


@targets
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_tensor_parallel_parts_sum_to_the_whole(target, ranks):
    weights, rope, hidden, want = problem()
    parts = []
    for rank in range(ranks):
        layer = MLALayer(
            DIMS, put_all(weights, target),
            rope=rope, output_gate=True, tp_rank=rank, tp_size=ranks,
        )  # fmt: skip
        server = Server(layer, hidden, target)
        parts.append(serve(server, 4))
    assert_close([sum(part) for part in zip(*parts)], want, BOUND)


@targets
@pytest.mark.parametrize("interleave", [1, 2, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", ["replicated", "all_to_all", "reduce_scatter"])
def test_context_parallel_is_the_layer(target, ranks, interleave, heads):
    """The last request has fewer tokens than there are ranks times runs: empty shards, and columns
    of the block table that padding alone reaches, with ids of no block."""
    weights, rope, hidden, want = problem()
    parallel = ContextParallel(ranks, interleave=interleave, block_size=2)
    sharded = heads != "replicated"

    def run(collective):
        options = {"cp_combine": heads, "tp_size": ranks} if sharded else {}
        if sharded:
            options["tp_rank"] = collective.rank
        layer = MLALayer(
            DIMS, put_all(weights, target),
            rope=rope, output_gate=True, context_parallel=parallel, collective=collective,
            cp_heads="sharded" if sharded else "replicated",
            **options,
        )  # fmt: skip
        server = Server(layer, hidden, target, block_size=2, columns=48, blocks=96)
        return serve(server, parallel.padding.rows)

    found = InProcess(ranks).run(run)
    if sharded:
        assert_close([sum(parts) for parts in zip(*found)], want, BOUND)
    else:
        for results in found:
            assert_close(results, want, BOUND)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8_per_token", "int4_per_token"])
def test_ranks_exchange_rows_as_they_are_stored(name):
    """Spread over ranks, a packed cache gives what one rank's gives, to rounding."""
    weights, rope, hidden, _ = problem()
    options = {"rope": rope, "output_gate": True, "cache_format": name}
    options |= {"k_scale": 0.013} if name == "fp8_e4m3" else {}
    single = serve(Server(MLALayer(DIMS, weights, **options), hidden), 4)
    parallel = ContextParallel(3, interleave=2, block_size=2)

    def run(collective):
        layer = MLALayer(DIMS, weights, context_parallel=parallel, collective=collective, **options)
        server = Server(layer, hidden, block_size=2, columns=48, blocks=96)
        return serve(server, parallel.padding.rows)

    for results in InProcess(3).run(run):
        for got, want in zip(results, single):
            assert np.median(abs(got - want)) < 1e-5
            assert_close([got], [want], 0.02)  # a code may round the other way


def test_blocks_of_tokens_that_see_each_other():
    """Not causal: each new token of a decode sees all of its request, on one rank and on three."""
    from sandbox.layers import prepare

    weights, rope, hidden, _ = problem()
    parallel = ContextParallel(3, interleave=2, block_size=2)

    def run(collective):
        spread = {} if collective is None else {"context_parallel": parallel}
        layer = MLALayer(
            DIMS, weights, rope=rope, output_gate=True, collective=collective, **spread
        )
        server = Server(layer, hidden, block_size=2, columns=48, blocks=96)
        server.step([4, 5, 2])
        plan = server.plan([3, 2, 3], decode_threshold=4)
        step = prepare(plan, causal=False)
        out = layer(server.next_tokens([3, 2, 3], plan), None, server.cache, step)
        server.keep([3, 2, 3], plan, out)
        return server.results()

    single = run(None)
    for results in InProcess(3).run(run):
        assert_close(results, single, BOUND)
    # The last token sees the same with causality; the others see more.
    causal = Server(MLALayer(DIMS, weights, rope=rope, output_gate=True), hidden)
    causal.step([4, 5, 2])
    causal.step([3, 2, 3], decode_threshold=4)
    for got, other in zip(single, causal.results()):
        assert_close([got[-1:]], [other[-1:]], BOUND)
        assert np.abs(got[-2] - other[-2]).max() > 1e-3
