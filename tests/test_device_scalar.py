"""Numbers as arrays of one element, whatever they were written as."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sandbox.arrays import bfloat16, device_scalar

SPELLINGS = [
    2.0,
    2,
    np.float64(2),
    np.float32(2),
    np.int64(2),
    ml_dtypes.bfloat16(2),
    np.full((), 2.0),
    np.full((1, 1), 2, bfloat16),
]


def assert_is_two(result):
    assert (result.shape, result.dtype) == ((1,), np.float32)
    assert result.flags.c_contiguous
    assert result.tobytes() == np.float32(2).tobytes()


@pytest.mark.parametrize("value", SPELLINGS, ids=lambda value: type(value).__name__)
def test_every_spelling_gives_the_same_bytes(value):
    assert_is_two(device_scalar(value, np))


def test_tensors_give_the_same_bytes(torch):
    assert_is_two(device_scalar(torch.tensor([2.0], dtype=torch.float64), np))
    assert_is_two(device_scalar(torch.tensor(2, dtype=torch.bfloat16), np))
    assert_is_two(device_scalar(torch.nn.Parameter(torch.tensor(2.0)), np))


def test_a_tensor_that_is_right_already_is_not_copied(torch):
    ready = torch.tensor(2.0)
    assert device_scalar(ready, np).ctypes.data == ready.data_ptr()


def test_what_is_right_already_is_not_copied():
    strided = np.arange(6, dtype=np.float32).reshape(2, 3)[1:, 2:]
    assert device_scalar(strided, np).ctypes.data == strided.ctypes.data
    count = np.zeros((), np.int64)
    assert device_scalar(count, np, np.int64).ctypes.data == count.ctypes.data


def test_special_values_are_kept():
    assert np.signbit(device_scalar(-0.0, np)[0])
    assert np.isnan(device_scalar(float("nan"), np)[0])
    assert device_scalar(float("-inf"), np)[0] == -np.inf


@pytest.mark.parametrize("value", ["2.0", None, True, 1j, np.bool_(True), [2.0], np.complex64(1)])
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(TypeError, match="k_scale: expected a number"):
        device_scalar(value, np, name="k_scale")


def test_many_elements_and_too_large_values_are_refused():
    with pytest.raises(ValueError, match=r"k_scale: expected one element, got shape \(2,\)"):
        device_scalar(np.ones(2), np, name="k_scale")
    with pytest.raises(ValueError, match="expected one element"):
        device_scalar(np.ones(0), np)
    for value in (1e300, np.float64(1e39), 10**400, np.full(1, 1e300)):
        with pytest.raises(ValueError, match=r"k_scale: .* is too large for float32"):
            device_scalar(value, np, name="k_scale")


def test_codes_are_refused():
    for codes in (np.array([0x38], np.uint8), np.array([True])):
        with pytest.raises(TypeError, match="scale"):
            device_scalar(codes, np)


def test_tensors_of_codes_are_refused(torch):
    with pytest.raises(TypeError, match="k_scale"):
        device_scalar(torch.tensor([0.5]).to(torch.float8_e4m3fn), np, name="k_scale")
