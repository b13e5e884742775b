"""What `linear` refuses, and names."""

import numpy as np
import pytest

from sandbox.arrays import bfloat16
from sandbox.kernels import linear

BUFFER = np.ones((12, 64), np.float32)
X, WEIGHT, BIAS = BUFFER[:5, :40], BUFFER[5:, :40], np.ones(7, np.float32)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"x": None}, TypeError, "x is missing"),
        ({"x": X.tolist()}, TypeError, "x"),
        ({"x": X[0]}, ValueError, "x has shape"),
        ({"x": X.astype(np.float64)}, TypeError, "x is float64"),
        ({"x": X[:, :0], "weight": WEIGHT[:, :0]}, ValueError, "x has shape .*I must be positive"),
        ({"x": ones(5, 80)[:, ::2]}, ValueError, "x has a last axis"),
        ({"x": X[::-1]}, ValueError, "x has strides"),
        ({"weight": None}, TypeError, "weight is missing"),
        ({"weight": WEIGHT[0]}, ValueError, "weight has shape"),
        ({"weight": WEIGHT[:, :-1]}, ValueError, "weight has shape .*expected 40 on axis 1: x's I"),
        ({"weight": WEIGHT[:0]}, ValueError, "weight has shape .*O must be positive"),
        ({"weight": WEIGHT.astype(bfloat16)}, TypeError, "weight is bfloat16"),
        ({"weight": ones(40, 7).T}, ValueError, "weight has a last axis"),
        ({"bias": ones(1, 7)}, ValueError, "bias has shape"),
        ({"bias": ones(40)}, ValueError, "bias has shape .*expected 7 on axis 0: weight's O"),
        ({"bias": BIAS.astype(np.float16)}, TypeError, "bias is float16"),
        ({"bias": ones(14)[::2]}, ValueError, "bias has a last axis"),
        ({"bias": 0.5}, TypeError, "bias is float"),
        ({"out": ones(5, 7, dtype=bfloat16)}, TypeError, "out is bfloat16"),
        ({"out": ones(5, 8)}, ValueError, "out has shape"),
        ({"out": ones(35)}, ValueError, "out has shape"),
        ({"out": ones(5, 14)[:, ::2]}, ValueError, "out has a last axis"),
        ({"out": ones(5, 7)[::-1]}, ValueError, "out has strides"),
        ({"out": np.broadcast_to(ones(7), (5, 7))}, ValueError, "its elements share memory"),
        ({"out": BUFFER[:5, 33:40]}, ValueError, "out shares memory with x"),
        ({"out": BUFFER[7:, 33:40]}, ValueError, "out shares memory with weight"),
        ({"bias": BUFFER[0, 40:47], "out": BUFFER[:5, 46:53]}, ValueError, "memory with bias"),
    ],
)
def test_bad_arguments_are_named(change, error, names):
    arguments = {"x": X, "weight": WEIGHT, "bias": BIAS, **change}
    before = {name: np.array(value) for name, value in arguments.items()}
    with pytest.raises(error, match=names):
        linear(**arguments)
    for name, value in arguments.items():
        np.testing.assert_array_equal(np.array(value), before[name])
