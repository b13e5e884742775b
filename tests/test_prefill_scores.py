"""Scores from one end of float32 to the other, softmax scales and descales."""

import numpy as np
import pytest
from attention_problems import (
    SCALE,
    close,
    fast_prefill,
    in_codes,
    prefill,
    prefill_problem,
    prefill_reference,
    same,
)

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3


class TestScores:
    @prefill
    def test_equal_keys(self, attend):
        """The LSE of `n` equal scores `s` is `log(n) + s`, the result the mean of the values."""
        problem = prefill_problem([2], [4], attend.dtype, heads=1)
        problem["k"][...] = problem["k"][:1]
        out, lse = attend(**problem)
        score = SCALE * (
            problem["q"][:, 0].astype(np.float64) @ problem["k"][0, 0].astype(np.float64)
        )
        close(lse[0], score + np.log([3, 4]))
        values = problem["v"][:, 0].astype(np.float64)
        close(out[:, 0], [values[:3].mean(0), values.mean(0)], attend.dtype)

    @fast_prefill
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("rising", [True, False])
    def test_huge_scores_are_finite(self, attend, sign, rising):
        """Scores from 0 to 10000, or -10000, larger or smaller from tile to tile."""
        problem = prefill_problem([1], [201], attend.dtype, heads=1) | {"softmax_scale": 1.0}
        problem["q"][...] = problem["k"][...] = 0
        problem["q"][..., 0] = 50 * sign
        steps = np.arange(201) if rising else np.arange(201)[::-1]
        problem["k"][:, 0, 0] = steps
        out, lse = attend(**problem)
        top = int(np.argmax(sign * steps))
        close(out[0, 0], problem["v"][top, 0], attend.dtype)
        close(lse, np.full((1, 1), 10000.0 if sign > 0 else 0.0))

    @fast_prefill
    def test_far_below_zero_is_not_nothing(self, attend):
        problem = prefill_problem([1], [130], attend.dtype, heads=1) | {"softmax_scale": 1.0}
        problem["q"][...] = problem["k"][...] = 0
        problem["q"][..., 0], problem["k"][..., 0] = -100, 100
        out, lse = attend(**problem)
        close(out[0, 0], problem["v"][:, 0].astype(np.float64).mean(axis=0), attend.dtype)
        close(lse, np.full((1, 1), np.log(130) - 10000))


class TestScalars:
    @prefill
    def test_softmax_scale_of_any_kind(self, attend):
        problem = prefill_problem([2], [3], attend.dtype, heads=1)
        out, lse = attend(**problem)
        for kind in (np.float64, np.float32):
            other, other_lse = attend(**problem | {"softmax_scale": kind(SCALE)})
            same(other, out)
            same(other_lse, lse)

    @fast_prefill
    def test_descales_of_any_kind(self, attend):
        torch = pytest.importorskip("torch")
        problem = in_codes(prefill_problem([3], [5]), (0.5, 0.25, 2.0))
        kinds = (
            float,
            np.float64,
            lambda x: np.array([x], np.float32),
            *([] if attend.target == "gpu" else [lambda x: torch.tensor(x)]),
        )
        found = [
            attend(
                **problem, q_descale=kind(0.5), k_descale=kind(0.25), v_descale=kind(2.0),
                out_dtype="float32",
            )
            for kind in kinds
        ]  # fmt: skip
        for out, lse in found[1:]:
            same(out, found[0][0])
            same(lse, found[0][1])

    @fast_prefill
    def test_codes_are_the_values_they_stand_for(self, attend):
        """Each descale where it belongs: scores have those of q and k, results that of v."""
        descales = (0.125, 0.5, 4.0)
        problem = in_codes(prefill_problem([3, 20], [5, 40]), descales)
        values = problem | {
            name: E4M3.decode(problem[name]).astype(np.float32) * np.float32(descale)
            for name, descale in zip("qkv", descales)
        }
        want, want_lse = prefill_reference(**values)
        named = {f"{name}_descale": descale for name, descale in zip("qkv", descales)}
        out, lse = attend(**problem, **named, out_dtype="float32")
        close(out, want, bfloat16, 2)
        close(lse, want_lse)
        assert attend(**problem, **named, return_lse=False).dtype == bfloat16
