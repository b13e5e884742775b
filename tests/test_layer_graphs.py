"""Steps in CUDA graphs, and what a step asks of memory."""

import numpy as np
import pytest
from layer_models import (
    TARGETS,
    H,
    Server,
    assert_close,
    back,
    decode_step,
    example,
    layer_of,
    put,
    targets,
)

from sandbox.layers import prepare


def captured(cupy, stream, call):
    """`call`, run once and then captured on the stream: a graph."""
    with stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    return graph


@pytest.mark.parametrize("target", TARGETS[2:])
def test_a_captured_decode_takes_new_inputs_lengths_and_padding(target):
    """Capture also shows that a step waits for nothing and allocates nothing."""
    import cupy

    module, settings, hidden, want = example()
    layer = layer_of(module, settings, target)
    server = Server(layer, hidden, target)
    server.step([5, 9, 3])
    like = put(np.zeros((4, H), np.float32), target)
    out = put(np.full((4, H), np.nan, np.float32), target)
    steps = decode_step(server, like, 4)
    steps.update([], server.table)
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = on_stream(target, stream, lambda: layer(like, None, server.cache, steps.step, out=out))
    allocations = layer.workspace.allocations
    for lens in ([1, 1, 1], [1, 0, 1], [1, 1, 0]):
        live = [request for request in range(3) if lens[request]]
        plan = server.plan(lens)
        padded = np.full((4, H), np.nan, np.float32)
        padded[: len(live)] = server.next_tokens(lens, plan)
        like[...] = put(padded, target)
        steps.update([server.done[r] for r in live], np.ascontiguousarray(server.table[live]))
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        got = back(out)
        assert not got[len(live) :].any()
        server.keep(lens, plan, got)
    assert layer.workspace.allocations == allocations
    assert_close(server.results(), [w[:d] for w, d in zip(want, server.done)], 3e-6)


def on_stream(target, stream, call):
    import cupy

    if target == "cupy":
        return captured(cupy, stream, call)
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        return captured(cupy, stream, call)


@pytest.mark.parametrize("target", TARGETS[2:])
def test_a_captured_prefill_waits_for_nothing(target):
    import cupy

    module, settings, hidden, want = example()
    layer = layer_of(module, settings, target)
    server = Server(layer, hidden, target, workspace_rows=8)
    server.step([5, 9, 3])
    lens = [6, 20, 4]
    plan = server.plan(lens)
    new = put(server.next_tokens(lens, plan), target)
    step, out = prepare(plan, like=new), put(np.full((30, H), np.nan, np.float32), target)
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    graph = on_stream(target, stream, lambda: layer(new, None, server.cache, step, out=out))
    out[...] = np.nan
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    server.keep(lens, plan, back(out))
    assert_close(server.results(), want, 3e-6)


def memory(target):
    """Bytes that CuPy and torch have from the driver, and hold."""
    if target not in ("cupy", "torch_cuda"):
        return ()
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    return pool.total_bytes(), pool.used_bytes(), torch.cuda.memory_allocated()


@targets
def test_a_second_step_allocates_nothing(target):
    module, settings, hidden, _ = example()
    layer = layer_of(module, settings, target)
    server = Server(layer, hidden, target, workspace_rows=8)
    server.step([5, 9, 3])
    plan = server.plan([6, 20, 1])
    new = put(server.next_tokens([6, 20, 1], plan), target)
    step, out = prepare(plan, like=new), put(np.empty((27, H), np.float32), target)
    held = []
    for _ in range(3):
        layer(new, None, server.cache, step, out=out)
        held.append((layer.workspace.allocations, layer.workspace.nbytes, *memory(target)))
    assert held[1:] == held[:-1]
    assert held[0][0] > 5
