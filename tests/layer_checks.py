"""Checks of the layer that every rank makes, in processes of their own."""

from typing import Any

import numpy as np
from layer_models import Server, assert_close, put_all, sequences

from sandbox import MLADims
from sandbox.layers import Collective, MLALayer, Rope, random_weights
from sandbox.planner import ContextParallel

DIMS = MLADims(12, 56, 40, 24, 8, 16, q_lora_rank=20)


def results(target: str, **options: Any) -> np.ndarray:
    """Outputs of prefills over context, decodes of one token and of several: `[T, H]`."""
    layer = MLALayer(
        DIMS,
        put_all(random_weights(DIMS, seed=6), target),
        rope=Rope.default(DIMS.R, 64),
        **options,
    )
    server = Server(layer, sequences(), target, block_size=2, columns=48, blocks=96)
    parallel = options.get("context_parallel")
    unit = parallel.padding.rows if parallel else 4
    server.step([5, 9, 0], workspace_rows=4 * unit)
    server.step([3, 18, 4], workspace_rows=2 * unit)
    server.step([3, 2, 2], decode_threshold=3)
    server.step([0, 0, 1])
    return np.concatenate(server.results())


def a_layer_over_ranks(collective: Collective, xp: Any) -> None:
    """Heads and context over the ranks: their parts sum to one rank's layer."""
    target = "numpy" if xp is np else "cupy"
    ranks = collective.world_size
    whole = results(target)
    spread = {
        "context_parallel": ContextParallel(ranks, interleave=3, block_size=2),
        "collective": collective,
    }
    assert_close([results(target, **spread)], [whole], 5e-6)
    for combine in ("all_to_all", "reduce_scatter"):
        shards = {"tp_rank": collective.rank, "tp_size": ranks, "cp_combine": combine}
        part = xp.asarray(results(target, **spread, **shards))
        parts = xp.empty((ranks, *part.shape), part.dtype)
        collective.all_gather(part, parts)
        total = parts.sum(axis=0)
        assert_close([total if xp is np else total.get()], [whole], 5e-6)
