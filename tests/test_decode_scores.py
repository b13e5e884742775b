"""Scores from one end of float32 to the other, and scales and counts of any type."""

import numpy as np
import pytest
from attention_problems import (
    SCALE,
    TINY,
    close,
    decode,
    decode_problem,
    decode_reference,
    fast_decode,
    packed_rows,
    paged,
    rows_of,
    same,
)

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3

L, E = TINY.L, TINY.E


class TestScores:
    @decode
    def test_equal_keys(self, attend):
        problem = decode_problem([4], attend.dtype)
        row = rows_of(problem, 0)[:1]
        problem |= paged([np.repeat(row, 4, axis=0)], 4)
        problem["q"][:, :, 0] = 0
        out, lse = attend(**problem)
        scores = SCALE * problem["q"][0, 0].astype(np.float64) @ row[0].astype(np.float64)
        close(lse[:, 0], scores + np.log(4))
        close(lse[0, 0], np.log(4))
        close(out[0, 0], np.tile(row[:, :L], (TINY.N, 1)), attend.dtype)

    @fast_decode
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("rising", [True, False])
    @pytest.mark.parametrize("splits", [None, 1, 3])
    def test_huge_scores_are_finite(self, attend, sign, rising, splits):
        """Scores from 0 to 10000, or -10000, larger or smaller from tile to tile."""
        problem = decode_problem([201], attend.dtype) | {"softmax_scale": 1.0}
        steps = np.arange(201) if rising else np.arange(201)[::-1]
        rows = np.random.default_rng(0).standard_normal((201, E)).astype(attend.dtype)
        rows[:, -1] = steps
        problem |= paged([rows], 4)
        problem["q"][...] = 0
        problem["q"][..., -1] = 50 * sign
        out, lse = attend(**problem, num_splits=splits)
        top = int(np.argmax(sign * steps))
        close(out[0, 0], np.tile(rows[top, :L], (TINY.N, 1)), attend.dtype)
        close(lse, np.full((TINY.N, 1), 10000.0 if sign > 0 else 0.0))

    @fast_decode
    @pytest.mark.parametrize("splits", [None, 3])
    def test_far_below_zero_is_not_nothing(self, attend, splits):
        problem = decode_problem([130], attend.dtype) | {"softmax_scale": 1.0}
        rows = np.random.default_rng(0).standard_normal((130, E)).astype(attend.dtype)
        rows[:, -1] = 100
        problem |= paged([rows], 4)
        problem["q"][...] = 0
        problem["q"][..., -1] = -100
        out, lse = attend(**problem, num_splits=splits)
        mean = rows[:, :L].astype(np.float64).mean(axis=0)
        close(out[0, 0], np.tile(mean, (TINY.N, 1)), attend.dtype)
        close(lse, np.full((TINY.N, 1), np.log(130) - 10000))

    @fast_decode
    def test_each_scale_where_it_belongs(self, attend):
        """Scores have those of queries and of rows, results that of rows."""
        rng = np.random.default_rng(3)
        values = rng.standard_normal((9, E), np.float32)
        rows, decoded, said = packed_rows("fp8_e4m3", values, TINY, 4.0)
        problem = decode_problem([9], tokens=2, seed=3)
        codes = E4M3.quantize(problem["q"], np.float32(0.125))
        queries = E4M3.decode(codes).astype(np.float32) * np.float32(0.125)
        want, want_lse = decode_reference(**problem | paged([decoded], 4) | {"q": queries})
        packed = problem | paged([rows], 4) | said | {"q": codes, "q_descale": 0.125}
        out, lse = attend(**packed, out_dtype="float32")
        close(out, want, bfloat16, 4)
        close(lse, want_lse)
        assert attend(**packed, return_lse=False).dtype == bfloat16


class TestScalars:
    @decode
    def test_softmax_scale_of_any_kind(self, attend):
        problem = decode_problem([3], attend.dtype, heads=1)
        want = attend(**problem)
        for kind in (np.float64, np.float32):
            for got, other in zip(attend(**problem | {"softmax_scale": kind(SCALE)}), want):
                same(got, other)

    @fast_decode
    def test_descales_of_any_kind(self, attend):
        torch = pytest.importorskip("torch")
        problem = decode_problem([9])
        values = np.random.default_rng(1).standard_normal((9, E), np.float32)
        rows, _, said = packed_rows("fp8_e4m3", values, TINY, 0.37)
        problem |= paged([rows], 4) | said
        problem["q"] = E4M3.quantize(problem["q"], np.float32(0.13))
        kinds = (
            float,
            np.float64,
            lambda x: np.array([x], np.float32),
            *([] if attend.target == "gpu" else [lambda x: torch.tensor(x)]),
        )
        found = [
            attend(**problem | {"k_scale": kind(0.37)}, q_descale=kind(0.13)) for kind in kinds
        ]
        for each in found[1:]:
            for got, want in zip(each, found[0]):
                same(got, want)

    @fast_decode
    def test_integers_of_any_kind(self, attend):
        problem = decode_problem([9, 40], attend.dtype)
        options = {"window": 5, "num_splits": 2, "max_seq_len": 40, "kv_lora_rank": L}
        want = attend(**problem | options)
        numpys = {name: np.int64(value) for name, value in options.items()}
        for got, other in zip(attend(**problem | numpys), want):
            same(got, other)
        for got, other in zip(attend(**problem | options | {"window": 2**40}), attend(**problem)):
            close(got, other, attend.dtype)
