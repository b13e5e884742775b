"""Decode attention where masks, sinks, splits and sizes meet at their ends."""

import numpy as np
import pytest
from attention_problems import (
    NO_BLOCKS,
    close,
    decode,
    decode_problem,
    ints,
    nothing_seen,
    same,
    tree_words,
)

from sandbox.kernels import decode_attention, prefill_attention


@decode
def test_new_token_that_no_query_sees_never_matters(attend):
    """A rejected draft: in the request's length, in nobody's tree, and NaN."""
    problem = decode_problem([70, 6], attend.dtype, tokens=3)
    seen = np.tile(np.eye(3, dtype=bool), (2, 1, 1))
    seen[:, :, 2] = False
    want = attend(**problem, tree_mask=tree_words(seen))
    for request, length in enumerate((70, 6)):
        place = length - 1
        block = problem["block_table"][request, place // problem["cache"].shape[1]]
        problem["cache"][block, place % problem["cache"].shape[1]] = np.nan
    for got, other in zip(attend(**problem, tree_mask=tree_words(seen)), want):
        same(got, other)


@decode
@pytest.mark.parametrize("sink", [-np.inf, 0.0, np.inf])
@pytest.mark.parametrize("splits", [None, 3])
def test_no_key_beside_a_sink_is_nothing(attend, sink, splits):
    problem = decode_problem([2, 3], attend.dtype)
    problem |= NO_BLOCKS | {"indices": np.full((2, 1, 150), -1, np.int32)}
    sinks = np.full(problem["q"].shape[2], sink, np.float32)
    nothing_seen(*attend(**problem, sink=sinks, num_splits=splits))


@decode
def test_no_query_beside_a_tree_is_nothing(attend):
    problem = decode_problem([4], attend.dtype)
    problem["q"] = problem["q"][:, :0]
    out, lse = attend(**problem, tree_mask=np.zeros((1, 0, 0), np.int32))
    assert out.shape[1] == 0
    assert lse.size == 0


@decode
@pytest.mark.parametrize("change", [{"window": 2**70}, {"num_splits": 2**31 - 1}], ids=str)
def test_more_than_there_is_room_for(attend, change):
    problem = decode_problem([70, 3], attend.dtype)
    for got, want in zip(attend(**problem, **change), attend(**problem)):
        close(got, want, attend.dtype)


def test_results_have_no_memory_in_common_with_scales():
    room = np.ones(12, np.float32)
    codes = np.full((6, 2, 16), 0x38, np.uint8)
    bounds = {"cu_seqlens_q": ints(0, 6), "cu_seqlens_k": ints(0, 6)}
    for name in ("q_descale", "k_descale", "v_descale"):
        scales = {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0, name: room[:1]}
        with pytest.raises(ValueError, match=f"out_lse shares memory with {name}"):
            prefill_attention(
                codes, codes, codes, **bounds, softmax_scale=0.1, **scales,
                out_lse=room.reshape(2, 6),
            )  # fmt: skip
    cache = np.zeros((2, 4, 16), np.uint8)
    for name, given in (("k_scale", {"q_descale": 1.0}), ("q_descale", {"k_scale": 1.0})):
        with pytest.raises(ValueError, match=f"out_lse shares memory with {name}"):
            decode_attention(
                codes[:, None], cache, np.zeros((6, 1), np.int32), np.ones(6, np.int32),
                softmax_scale=0.1, kv_lora_rank=8, cache_format="fp8_e4m3",
                out_lse=room.reshape(2, 6), **given, **{name: room[:1]},
            )  # fmt: skip
