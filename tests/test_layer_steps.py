"""What layers read of a plan, and decode steps in fixed memory: with and without a graph."""

import numpy as np
import pytest
from layer_models import (
    H,
    Server,
    assert_close,
    at_once,
    attention_module,
    back,
    config,
    decode_step,
    example,
    layer_of,
    put,
    sequences,
    targets,
    unchanged,
)

from sandbox.layers import DecodeSteps, InProcess, prepare
from sandbox.planner import ContextParallel, RowPadding, plan_step

TABLE = np.arange(40, dtype=np.int32).reshape(4, 10)
ONE = ContextParallel(1, block_size=4)


def test_decodes_of_different_lengths_are_padded_at_their_front():
    plan = plan_step([2, 1, 3], [5, 0, 9], TABLE[:3], 4, None, decode_threshold=3)
    inputs = prepare(plan).decode
    assert (inputs.tokens, inputs.query_len, inputs.max_seq_len) == (6, 3, 12)
    padded = inputs.padded.reshape(3, 3)
    assert padded[0, 1:].tolist() == [0, 1]
    assert padded[1, 2] == 2
    assert padded[2].tolist() == [3, 4, 5]
    assert inputs.places.tolist() == [1, 2, 5, 6, 7, 8]
    assert inputs.padded.min() >= 0
    assert inputs.padded.max() < 6


def test_uniform_decodes_are_not_padded():
    plan = plan_step([2, 2], [5, 0], TABLE[:2], 4, None, decode_threshold=3)
    inputs = prepare(plan).decode
    assert inputs.padded is None
    assert inputs.places is None
    assert inputs.seq_lens.tolist() == [7, 2]


def test_requests_without_a_token_between_decodes():
    module, settings, hidden, want = example()
    server = Server(layer_of(module, settings), hidden)
    server.step([3, 5, 2])
    server.step([1, 0, 1])
    server.step([2, 0, 1], decode_threshold=2)
    server.step([0, 0, 0])
    assert_close(server.results(), [w[:d] for w, d in zip(want, server.done)], 3e-6)


def test_tree_masks_that_do_not_fit_are_refused():
    mask = np.ones((2, 2, 1), np.int32)
    uniform = plan_step([2, 2], [5, 3], TABLE[:2], 4, None, decode_threshold=2)
    assert prepare(uniform, tree_mask=mask).decode.tree_mask is mask
    for plan, options, reason in (
        (plan_step([9], [0], TABLE[:1], 4, None), {}, "the step has no decodes"),
        (plan_step([2, 1], [5, 3], TABLE[:2], 4, None, decode_threshold=2), {}, "different"),
        (uniform, {"causal": False}, "causal is False"),
        (plan_step([2], [5], TABLE[:1], 4, None, decode_threshold=2, parallel=ONE), {}, "spread"),
    ):
        with pytest.raises(ValueError, match=reason):
            prepare(plan, tree_mask=mask, **options)
    with pytest.raises(TypeError, match="tree_mask is int64"):
        prepare(uniform, tree_mask=mask.astype(np.int64))
    with pytest.raises(ValueError, match=r"tree_mask has shape \(1, 2, 1\)"):
        prepare(uniform, tree_mask=mask[:1])


def test_only_plans_are_prepared():
    for other in (None, prepare(plan_step([2], [5], TABLE[:1], 4, None))):
        with pytest.raises(TypeError, match="expected a Plan of plan_step"):
            prepare(other)
    with pytest.raises(TypeError, match="world_size is str"):
        ContextParallel("2")


def test_a_plan_that_pads_contexts_is_refused():
    plan = plan_step([2], [5], TABLE[:1], 4, None, padding=RowPadding(4, 4))
    with pytest.raises(ValueError, match="plan pads contexts"):
        prepare(plan)


def test_very_different_decodes_are_taken_one_by_one():
    """One long block of speculated tokens does not make room for as many of each request."""
    plan = plan_step([1, 9, 0, 1], [5, 4, 7, 0], TABLE, 4, None, decode_threshold=9)
    inputs = prepare(plan).decode
    assert (inputs.tokens, inputs.query_len, inputs.padded) == (11, 1, None)
    assert inputs.seq_lens.tolist() == [6, *range(5, 14), 1]
    assert inputs.block_table[:, 0].tolist() == [0, *[10] * 9, 30]
    module, settings, hidden, want = example()
    for causal in (True, False):
        server = Server(layer_of(module, settings), hidden)
        server.step([3, 4, 2])
        plan = server.plan([1, 9, 1], decode_threshold=9)
        step = prepare(plan, causal=causal)
        out = server.layer(server.next_tokens([1, 9, 1], plan), None, server.cache, step)
        server.keep([1, 9, 1], plan, out)
        expected = [w[:d] for w, d in zip(want, server.done)]
        if causal:
            assert_close(server.results(), expected, 3e-6)
        else:
            got = server.results()
            assert_close([got[1][-1:]], [expected[1][-1:]], 3e-6)
            assert np.abs(got[1][-2] - expected[1][-2]).max() > 1e-3


def test_a_tree_decides_what_new_tokens_see():
    """A chain as a tree gives what causality gives; two branches do not see each other."""
    module, settings, hidden, want = example()
    outs = {}
    for name, words in (("chain", [1, 3, 7]), ("branches", [1, 3, 5])):
        server = Server(layer_of(module, settings), hidden)
        server.step([5, 6, 4])
        plan = server.plan([3, 3, 3], decode_threshold=3)
        mask = np.broadcast_to(np.array(words, np.int32)[None, :, None], (3, 3, 1)).copy()
        step = prepare(plan, tree_mask=mask)
        outs[name] = server.layer(server.next_tokens([3, 3, 3], plan), None, server.cache, step)
    expected = np.concatenate([w[n : n + 3] for w, n in zip(want, (5, 6, 4))])
    assert_close([outs["chain"]], [expected], 3e-6)
    chain, branches = (out.reshape(3, 3, H) for out in (outs["chain"], outs["branches"]))
    assert_close([branches[:, :2].reshape(-1, H)], [chain[:, :2].reshape(-1, H)], 3e-6)
    assert np.abs(branches[:, 2] - chain[:, 2]).max() > 0.01


@targets
@pytest.mark.parametrize("query_len", [1, 2])
def test_decodes_in_fixed_memory_are_those_of_a_plan(target, query_len):
    """Padded requests have NaN for hidden states: they change nothing and give 0."""
    settings = config(attention_bias=True)
    module = attention_module(settings)
    hidden = example()[2]
    layer = layer_of(module, settings, target)
    planned, fixed = (Server(layer, hidden, target) for _ in range(2))
    for server in (planned, fixed):
        server.step([5, 9, 3])
    lens = [query_len] * 3
    padded = np.full((5 * query_len, H), np.nan, np.float32)
    steps = decode_step(fixed, put(padded, target), 5, query_len)
    for _ in range(2):
        plan = fixed.plan(lens, decode_threshold=query_len)
        padded[: 3 * query_len] = fixed.next_tokens(lens, plan)
        step = steps.update(fixed.done, fixed.table)
        assert step is steps.step
        out = back(layer(put(padded, target), None, fixed.cache, step))
        assert not out[3 * query_len :].any()
        fixed.keep(lens, plan, out)
        planned.step(lens, decode_threshold=query_len)
    assert_close(fixed.results(), planned.results(), 3e-6)


def test_decodes_in_fixed_memory_on_several_ranks():
    module, settings, hidden, want = example()
    parallel = ContextParallel(3, interleave=2, block_size=2)

    def run(collective):
        layer = layer_of(module, settings, context_parallel=parallel, collective=collective)
        server = Server(layer, hidden, block_size=2, columns=48, blocks=96)
        server.step([5, 9, 3])
        steps = decode_step(server, None, 4, 2, parallel=parallel, rank=collective.rank)
        plan = server.plan([2, 2, 2], decode_threshold=2)
        padded = np.full((8, H), np.nan, np.float32)
        padded[:6] = server.next_tokens([2, 2, 2], plan)
        out = layer(padded, None, server.cache, steps.update(server.done, server.table))
        assert not out[6:].any()
        server.keep([2, 2, 2], plan, out)
        return server.results()

    for results in InProcess(3).run(run):
        assert_close(results, [w[:n] for w, n in zip(want, (7, 11, 5))], 5e-6)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("combine", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize("causal", [True, False])
def test_fewer_requests_leave_nothing_of_those_before(ranks, combine, causal):
    """Four requests, then one, then two: what is padding now is what the buffers held before."""
    settings = config(attention_bias=True)
    module, hidden = attention_module(settings), sequences((6, 7, 5, 9))
    parallel = ContextParallel(ranks, interleave=2, block_size=2) if ranks > 1 else None
    block_size = 2 if parallel else 4

    def run(collective):
        spread = {}
        if parallel:
            spread = {"context_parallel": parallel, "collective": collective}
            spread |= {"tp_rank": collective.rank, "tp_size": ranks, "cp_combine": combine}
        layer = layer_of(module, settings, **spread)
        options = {"block_size": block_size, "columns": 24, "blocks": 96}
        fixed, planned = (Server(layer, hidden, **options) for _ in range(2))
        rank = 0 if collective is None else collective.rank
        steps = decode_step(fixed, None, 4, 2, parallel=parallel, rank=rank, causal=causal)
        for server in (fixed, planned):
            server.step([2, 3, 1, 5])
        outs = []
        for live in ([0, 1, 2, 3], [2], [0, 3]):
            lens = [2 if request in live else 0 for request in range(4)]
            plan = planned.plan(lens, decode_threshold=2)
            new = planned.next_tokens(lens, plan)
            padded = np.full((8, H), np.inf, np.float32)
            padded[: len(new)] = new
            table = np.ascontiguousarray(fixed.table[live])
            step = steps.update([fixed.done[request] for request in live], table)
            out = layer(padded, None, fixed.cache, step)
            assert not out[len(new) :].any()
            want = layer(new, None, planned.cache, prepare(plan, causal=causal))
            for request in live:
                fixed.done[request] += 2
                planned.done[request] += 2
            outs.append((out[: len(new)], want))
        return outs

    for outs in InProcess(ranks).run(run) if ranks > 1 else [run(None)]:
        for got, want in outs:
            assert_close([got], [want], 3e-6)


def test_update_refuses_what_the_table_has_no_block_for():
    for parallel in (None, ContextParallel(2, block_size=4)):
        steps = DecodeSteps(1, columns=2, block_size=4, num_blocks=9, parallel=parallel)
        far = 8 if parallel is None else 16
        with pytest.raises(ValueError, match="no block"):
            steps.update([far], np.array([[0, 1]], np.int32))
        with pytest.raises(ValueError, match="no block"):
            steps.update([0], np.array([[9, 1]], np.int32))
    pair = ContextParallel(2, block_size=4)
    with pytest.raises(ValueError, match="block_size is 8, but parallel's is 4"):
        DecodeSteps(1, columns=2, block_size=8, parallel=pair)
    with pytest.raises(ValueError, match="rank is 2"):
        DecodeSteps(1, columns=2, block_size=4, parallel=pair, rank=2)
    with pytest.raises(ValueError, match="columns is 0"):
        DecodeSteps(1, columns=0, block_size=4)


def test_update_refuses_a_table_of_other_columns():
    steps = DecodeSteps(2, columns=10, block_size=4)
    with pytest.raises(ValueError, match="expected 10 columns"):
        steps.update([3], TABLE[:, :9].copy())
    with pytest.raises(ValueError, match="context_lens has 3 requests, room is 2"):
        steps.update([1, 2, 3], TABLE)


@pytest.mark.parametrize("target", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_nothing_of_an_earlier_step_matters(target):
    """Workspace arrays full of NaN give the same results."""
    module, settings, hidden, want = example()
    layer = layer_of(module, settings, target)
    server = Server(layer, hidden, target, workspace_rows=8)
    for lens in ([5, 9, 3], [3, 1, 3], [1, 1, 1], [2, 17, 0], [0, 1, 0]):
        for adopted, _ in layer.workspace._blocks.values():
            adopted[...] = 0xFF
        server.step(lens)
    assert server.done == [len(one) for one in hidden]
    assert_close(server.results(), want, 3e-6)


@targets
def test_a_step_serves_many_layers_and_a_shared_workspace(target):
    _, settings, hidden, _ = example()
    modules = [attention_module(settings, seed=seed) for seed in (0, 8)]
    first = layer_of(modules[0], settings, target)
    shared = [first, layer_of(modules[1], settings, target, workspace=first.workspace)]
    alone = [layer_of(module, settings, target) for module in modules]
    outs = []
    for layers in (shared, alone):
        servers = [Server(layer, hidden, target, workspace_rows=8) for layer in layers]
        for server in servers:
            server.step([5, 9, 3])
        plan = servers[0].plan([6, 20, 4])
        x = put(servers[0].next_tokens([6, 20, 4], plan), target)
        step = prepare(plan, like=x)
        for layer, server in zip(layers, servers):
            with unchanged(x):
                y = layer(x, None, server.cache, step)
            x = y
        outs.append(back(x))
    assert np.array_equal(*outs)
    assert shared[0].workspace is shared[1].workspace


def test_everything_at_once_needs_no_context_arrays():
    """Without context there is neither gather nor merge nor an LSE."""
    module, settings, hidden, want = example()
    layer = layer_of(module, settings)
    stages = []
    layer.on_stage = stages.append
    server = Server(layer, hidden)
    at_once(server)
    assert_close(server.results(), want, 3e-6)
    assert {"gather", "merge", "concat"}.isdisjoint(stages)
    assert not {"lse", "context"} & {name for _, name in layer.workspace._blocks}


def test_a_name_of_a_device_is_no_array_on_it():
    plan = plan_step([3], [0], np.zeros((1, 1), np.int32), 4, None)
    with pytest.raises(TypeError, match="like: expected an array"):
        prepare(plan, like="cuda")
    with pytest.raises(TypeError, match="like: expected an array"):
        DecodeSteps(2, columns=3, block_size=4, like="cuda")
