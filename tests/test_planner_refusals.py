"""Sizes that a planner refuses, by the names that the caller gave them."""

import numpy as np
import pytest

from sandbox.planner import ContextParallel, DecodePlanner, plan_step

TABLE = np.zeros((1, 4), np.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size is 0, expected at least 1"),
        ({"block_size": 4.0}, TypeError, "block_size is float, expected an integer"),
        ({"block_size": True}, TypeError, "block_size is bool"),
        ({"workspace_rows": 0}, ValueError, "workspace_rows is 0"),
        ({"workspace_rows": "8"}, TypeError, "workspace_rows is str"),
        ({"workspace_rows": 10.5}, TypeError, "workspace_rows is float"),
        ({"alignment": 0}, ValueError, "alignment is 0"),
        ({"decode_threshold": 0}, ValueError, "decode_threshold is 0"),
    ],
)
def test_of_a_step(change, error, message):
    sizes = {"block_size": np.int64(4), "workspace_rows": np.int32(8)}
    assert plan_step([3], [5], TABLE, **sizes).batch.num_tokens == 3
    with pytest.raises(error, match=message):
        plan_step([3], [5], TABLE, **{**sizes, **change})


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (2.0, TypeError), ("2", TypeError)])
def test_of_everything_else(value, error):
    for name in ("world_size", "interleave", "block_size"):
        with pytest.raises(error, match=f"{name} is "):
            ContextParallel(**{"world_size": 2, name: value})
    for name in ("max_requests", "query_len", "block_size"):
        with pytest.raises(error, match=f"{name} is "):
            DecodePlanner(**{"max_requests": 2, "block_size": 4, name: value})


def test_a_position_without_a_block_says_what_ids_there_are():
    with pytest.raises(ValueError, match=r"no block \(4 columns of 2 tokens\)"):
        plan_step([3], [7], TABLE, 2, None)
    with pytest.raises(ValueError, match=r"no block \(4 columns of 2 tokens, ids below 9\)"):
        plan_step([3], [7], TABLE, 2, None, num_blocks=9)
