"""Bad input of prefill attention is refused by name."""

import numpy as np
import pytest
from attention_problems import (
    POISON,
    bounds,
    in_codes,
    ints,
    numbers,
    poisoned,
    prefill_problem,
)
from numpy.lib.stride_tricks import as_strided

from sandbox.arrays import bfloat16
from sandbox.kernels import prefill_attention
from sandbox.kernels.conformance import bits_of

GOOD = prefill_problem([2, 3], [4, 3])
CODES = {**in_codes(GOOD, (1, 1, 1)), "q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
CODES["out_dtype"] = "float32"
ROOM = np.full(1000, POISON, np.float32)


def changed(name, change):
    return {name: change(GOOD[name])}


def shifted(start, shape):
    return ROOM[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"q": None}, TypeError, "q is missing"),
        ({"q": [[[1.0]]]}, TypeError, "q"),
        (changed("q", lambda q: q[0]), ValueError, "q has shape"),
        (changed("q", lambda q: q.astype(np.float64)), TypeError, "q is float64"),
        (changed("q", lambda q: q.astype(np.float16)), TypeError, "k is float32"),
        (changed("q", lambda q: q.swapaxes(1, 2)), ValueError, "q has a last axis"),
        (changed("q", lambda q: q[::-1]), ValueError, "q has strides"),
        (changed("q", lambda q: q[..., :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[:, :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :16]), ValueError, "k has shape"),
        (changed("k", lambda k: k[:, :1]), ValueError, "k has shape"),
        (changed("k", lambda k: k[:6]), ValueError, "v has shape"),
        (changed("v", lambda v: v[:, :1]), ValueError, "v has shape"),
        (changed("v", lambda v: v[..., ::2]), ValueError, "v has a last axis"),
        (changed("v", lambda v: v[..., :0]), ValueError, "v has shape"),
        (changed("v", lambda v: v.astype(bfloat16)), TypeError, "v is bfloat16"),
        ({"cu_seqlens_q": bounds([2, 3]).astype(np.int64)}, TypeError, "cu_seqlens_q is int64"),
        ({"cu_seqlens_q": bounds([2, 3])[None]}, ValueError, "cu_seqlens_q has shape"),
        ({"cu_seqlens_q": ints()}, ValueError, "cu_seqlens_q is empty"),
        ({"cu_seqlens_q": ints(0, 0, 2, 0, 5)[::2]}, ValueError, "cu_seqlens_q has a last axis"),
        ({"cu_seqlens_q": ints(0, 5, 3)}, ValueError, "cu_seqlens_q must not decrease"),
        ({"cu_seqlens_q": ints(1, 2, 5)}, ValueError, "cu_seqlens_q starts at 1"),
        ({"cu_seqlens_q": ints(-1, 2, 5)}, ValueError, "cu_seqlens_q must not"),
        ({"cu_seqlens_q": ints(0, 2, 6)}, ValueError, "cu_seqlens_q ends at 6"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is missing"),
        ({"cu_seqlens_k": ints(0, 7)}, ValueError, "cu_seqlens_k has shape"),
        ({"cu_seqlens_k": ints(0, 4, 8)}, ValueError, "cu_seqlens_k ends at 8"),
        ({"cu_seqlens_k": ints(4, 0, 7)}, ValueError, "cu_seqlens_k must not decrease"),
        ({"cu_seqlens_k": ints(-1, 0, 7)}, ValueError, "cu_seqlens_k must not"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
        ({"softmax_scale": -0.1}, ValueError, "softmax_scale"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale"),
        ({"softmax_scale": np.inf}, ValueError, "softmax_scale"),
        ({"softmax_scale": 1e39}, ValueError, "softmax_scale"),
        ({"softmax_scale": 1e-60}, ValueError, "softmax_scale"),
        ({"softmax_scale": None}, TypeError, "softmax_scale is NoneType"),
        ({"softmax_scale": True}, TypeError, "softmax_scale is bool"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale is str"),
        ({"causal": 1}, TypeError, "causal is int"),
        ({"causal": None}, TypeError, "causal is NoneType"),
        ({"return_lse": "no"}, TypeError, "return_lse is str"),
        ({"return_lse": False}, ValueError, "out_lse is given"),
        ({"lse_base": 2}, ValueError, "lse_base is 2"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"lse_layout": "HT"}, ValueError, "lse_layout"),
        ({"lse_layout": "BNS"}, ValueError, "lse_layout"),
        ({"lse_layout": "TN"}, ValueError, "out_lse has shape"),
        ({"q_descale": 1.0}, ValueError, "q_descale is given, but q is float32"),
        ({"v_descale": 1.0}, ValueError, "v_descale is given, but v is float32"),
        ({**CODES, "q_descale": None}, ValueError, "q_descale is missing"),
        ({**CODES, "k_descale": None}, ValueError, "k_descale is missing"),
        ({**CODES, "v_descale": None}, ValueError, "v_descale is missing"),
        ({**CODES, "v_descale": 0.0}, ValueError, "v_descale is 0.0"),
        ({**CODES, "k_descale": np.nan}, ValueError, "k_descale is nan"),
        ({**CODES, "q_descale": -1.0}, ValueError, "q_descale is -1.0"),
        ({**CODES, "q_descale": np.ones(2, np.float32)}, ValueError, "q_descale"),
        ({**CODES, "q_descale": "1"}, TypeError, "q_descale"),
        ({"out_dtype": np.float64}, TypeError, "out_dtype"),
        ({"out_dtype": "fp8"}, TypeError, "out_dtype"),
        ({"out_dtype": "float16"}, TypeError, "out is float32, expected float16"),
        ({"out": np.full((5, 2, 16), POISON)}, TypeError, "out is float64"),
        ({"out": poisoned((5, 2, 16), np.int32)}, TypeError, "out is int32"),
        ({"out": poisoned((5, 16))}, ValueError, "out has shape"),
        ({"out": poisoned((2, 5, 16))}, ValueError, "out has shape"),
        ({"out": poisoned((5, 2, 32))}, ValueError, "out has shape"),
        ({"out": poisoned((5, 2, 32))[..., ::2]}, ValueError, "out has a last axis"),
        ({"out": poisoned((5, 2, 16))[::-1]}, ValueError, "out has strides"),
        ({"out": np.broadcast_to(np.float32(POISON), (5, 2, 16))}, ValueError, "out"),
        ({"out": as_strided(ROOM, (5, 2, 16), (64, 32, 4))}, ValueError, "out has strides"),
        ({"out_lse": poisoned((5, 2))}, ValueError, "out_lse has shape"),
        ({"out_lse": poisoned((2, 5), np.float16)}, TypeError, "out_lse is float16"),
        ({"out_lse": poisoned((2, 5))[:, ::-1]}, ValueError, "out_lse has strides"),
        ({"out": GOOD["q"][..., :16]}, ValueError, "out shares memory with q"),
        ({"out": GOOD["k"][:5, :, 16:]}, ValueError, "out shares memory with k"),
        ({"out": GOOD["v"][:5]}, ValueError, "out shares memory with v"),
        ({"out_lse": GOOD["v"].reshape(-1)[3:13].reshape(2, 5)}, ValueError, "out_lse shares"),
        (
            {"out": shifted(0, (5, 2, 16)), "out_lse": shifted(159, (2, 5))},
            ValueError,
            "out shares memory with out_lse",
        ),
        ({"variant": "no such"}, ValueError, "no such"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(change, error, names):
    given = {"out": poisoned((5, 2, 16)), "out_lse": poisoned((2, 5))}
    arguments = {**GOOD, **given, **change}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(error, match=names):
        prefill_attention(**arguments)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits_of(array), bits_of(before[name]), err_msg=name)


def test_values_are_checked_only_where_asked_for(rng):
    """Bounds that decrease raise on a CPU unless the caller forbids to look."""
    problem = prefill_problem([1], [2]) | {"cu_seqlens_k": ints(1, 3)}
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 3"):
        prefill_attention(**problem)
    problem["k"], problem["v"] = numbers(rng, (3, 2, 32)), numbers(rng, (3, 2, 16))
    prefill_attention(**problem, check_values=False)
