"""What the merges refuse, by argument, before they write anything."""

import numpy as np
import pytest
from lse_merge_states import state, two_states

from sandbox.kernels.lse_merge import lse_merge, lse_merge_k


def pair_arguments():
    (prefix, prefix_lse), (suffix, suffix_lse) = (state((4, 3, 16), seed=s) for s in (1, 2))
    return {
        "prefix": prefix,
        "prefix_lse": prefix_lse,
        "suffix": suffix,
        "suffix_lse": suffix_lse,
        "out": np.full((4, 3, 16), 77.0, np.float32),
        "out_lse": np.full((3, 4), 77.0, np.float32),
    }


GOOD = pair_arguments()
ROOM = np.zeros(400, np.float32)


def shifted(start, shape):
    return ROOM[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"prefix": None}, TypeError, "prefix"),
        ({"prefix": GOOD["prefix"].astype(np.float64)}, TypeError, "prefix"),
        ({"prefix": GOOD["prefix"].astype(np.float16)}, TypeError, "suffix"),
        ({"prefix": GOOD["prefix"][0]}, ValueError, "prefix"),
        ({"prefix": GOOD["prefix"][:3]}, ValueError, "suffix"),
        ({"prefix": GOOD["prefix"].swapaxes(1, 2)}, ValueError, "prefix"),
        ({"prefix": GOOD["prefix"][::-1]}, ValueError, "prefix"),
        ({"suffix": np.zeros((4, 3, 8), np.float32)}, ValueError, "suffix"),
        ({"prefix_lse": GOOD["prefix_lse"].astype(np.float64)}, TypeError, "prefix_lse"),
        ({"prefix_lse": GOOD["prefix_lse"].astype(np.float16)}, TypeError, "prefix_lse"),
        ({"prefix_lse": GOOD["prefix_lse"].T}, ValueError, "prefix_lse.*'NT'"),
        ({"suffix_lse": GOOD["suffix_lse"][None]}, ValueError, "suffix_lse"),
        ({"suffix_lse": GOOD["suffix_lse"][:, ::-1]}, ValueError, "suffix_lse"),
        ({"lse_layout": "TN"}, ValueError, "prefix_lse.*'TN'"),
        ({"lse_layout": "HT"}, ValueError, "lse_layout"),
        ({"lse_base": 2}, ValueError, "lse_base"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"return_lse": False}, ValueError, "out_lse"),
        ({"return_lse": "no"}, TypeError, "return_lse"),
        ({"out": np.zeros((4, 3, 16), np.float16)}, TypeError, "out"),
        ({"out": np.zeros((3, 4, 16), np.float32)}, ValueError, "out"),
        ({"out": np.zeros((4, 16, 3), np.float32).swapaxes(1, 2)}, ValueError, "out"),
        ({"out": np.broadcast_to(np.float32(0), (4, 3, 16))}, ValueError, "out"),
        ({"out_lse": np.zeros((4, 3), np.float32)}, ValueError, "out_lse"),
        ({"out_lse": np.zeros((3, 4), np.float64)}, TypeError, "out_lse"),
        (
            {"suffix": shifted(0, (4, 3, 16)), "out_lse": shifted(4, (3, 4))},
            ValueError,
            "out_lse.*suffix",
        ),
        (
            {"prefix": shifted(0, (4, 3, 16)), "out": shifted(16, (4, 3, 16))},
            ValueError,
            "out.*prefix",
        ),
        (
            {"suffix": shifted(16, (4, 3, 16)), "out": shifted(0, (4, 3, 16))},
            ValueError,
            "out.*suffix",
        ),
        (
            {"suffix_lse": shifted(0, (3, 4)), "out_lse": shifted(1, (3, 4))},
            ValueError,
            "out_lse.*suffix_lse",
        ),
        (
            {"out": shifted(0, (4, 3, 16)), "out_lse": shifted(191, (3, 4))},
            ValueError,
            "out.*out_lse",
        ),
    ],
)
def test_pair_refuses_bad_input(change, error, names):
    arguments = pair_arguments() | change
    before = {name: arguments[name].copy() for name in ("out", "out_lse")}
    with pytest.raises(error, match=names):
        lse_merge(**arguments)
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array)


PARTIALS = np.ones((2, 4, 3, 16), np.float32)
LSES = np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"partials": PARTIALS[0]}, ValueError, "partials"),
        ({"partials": PARTIALS[:0], "lses": LSES[:0]}, ValueError, "partials"),
        ({"partials": PARTIALS.astype(np.int32)}, TypeError, "partials"),
        ({"lses": LSES[:1]}, ValueError, "lses"),
        ({"lses": LSES.swapaxes(1, 2)}, ValueError, "lses.*'NT'"),
        ({"lses": LSES.astype(np.float64)}, TypeError, "lses"),
        ({"out_dtype": np.float64}, TypeError, "out_dtype"),
        ({"out_dtype": "fp8"}, TypeError, "out_dtype"),
        ({"out_dtype": "bfloat16", "out": np.ones((4, 3, 16), np.float32)}, TypeError, "out"),
        ({"out": np.ones((4, 3, 16), np.int32)}, TypeError, "out"),
        ({"out": PARTIALS[0]}, ValueError, "out.*partials"),
        ({"out_lse": LSES[1]}, ValueError, "out_lse.*lses"),
        ({"lse_base": "E"}, ValueError, "lse_base"),
    ],
)
def test_stacked_refuses_bad_input(change, error, names):
    with pytest.raises(error, match=names):
        lse_merge_k(**{"partials": PARTIALS, "lses": LSES} | change)
    assert (PARTIALS == 1).all()
    assert not LSES.any()


STATES = two_states((3, 2, 16))


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"output_scale": 0.0}, ValueError, "output_scale"),
        ({"output_scale": -1.0}, ValueError, "output_scale"),
        ({"output_scale": np.float32(np.nan)}, ValueError, "output_scale"),
        ({"output_scale": np.array([np.inf], np.float32)}, ValueError, "output_scale"),
        ({"output_scale": np.ones(2, np.float32)}, ValueError, "output_scale"),
        ({"output_scale": "0.5"}, TypeError, "output_scale"),
        ({"output_scale": True}, TypeError, "output_scale"),
        ({"output_scale": 0.5, "out": np.zeros((3, 2, 16), np.float32)}, TypeError, "out"),
        ({"output_scale": 0.5, "out": STATES[0].view(np.uint8)[..., ::4]}, ValueError, "out"),
        ({"output_scale": 0.5, "out": STATES[0].view(np.uint8)[..., :16]}, ValueError, "prefix$"),
        ({"out": np.zeros((3, 2, 16), np.uint8)}, TypeError, "out"),
    ],
)
def test_pair_of_codes_refuses_bad_input(change, error, names):
    before = [each.copy() for each in STATES]
    with pytest.raises(error, match=names):
        lse_merge(*STATES, **change)
    for array, copy in zip(STATES, before):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"output_scale": 0.0}, ValueError, "output_scale"),
        ({"output_scale": 0.5, "out_dtype": "float32"}, ValueError, "out_dtype"),
        ({"output_scale": 0.5, "out": np.ones((3, 2, 16), np.float32)}, TypeError, "out"),
        ({"out": np.ones((3, 2, 16), np.uint8)}, TypeError, "out"),
    ],
)
def test_stacked_codes_refuse_bad_input(change, error, names):
    partials, lses = np.ones((2, 3, 2, 16), np.float32), np.zeros((2, 2, 3), np.float32)
    with pytest.raises(error, match=names):
        lse_merge_k(partials, lses, **change)


def test_unfused_refuses_what_has_no_codes():
    with pytest.raises(RuntimeError, match="output_scale"):
        lse_merge(*STATES, variant="raw_unfused")
