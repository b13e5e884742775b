"""Sinks, which take a share of the probabilities, and the mass that keys are left with."""

import numpy as np
import pytest
from attention_problems import (
    SCALE,
    TINY,
    close,
    decode,
    decode_problem,
    fast_decode,
    poisoned,
    rows_of,
    same,
    slots_of,
    with_indices,
)

from sandbox.kernels.conformance import bits_of


class TestSink:
    @decode
    def test_without_weight_it_is_none(self, attend):
        problem = decode_problem([3, 0], attend.dtype)
        sink = np.full(TINY.N, -np.inf, np.float32)
        for got, want in zip(attend(**problem, sink=sink), attend(**problem)):
            same(got, want)

    @decode
    @pytest.mark.parametrize("logit", [500.0, 1e30, np.inf])
    def test_of_all_weight_leaves_nothing(self, attend, logit):
        problem = decode_problem([5, 0], attend.dtype)
        sink = np.full(TINY.N, logit, np.float32)
        out, lse = attend(**problem, sink=sink)
        close(out, np.zeros(out.shape))
        same(lse, attend(**problem)[1])

    @decode
    def test_takes_the_share_of_one_more_key(self, attend):
        """Each head has its own; the LSE is without it."""
        problem = decode_problem([4, 6], attend.dtype)
        out, lse = attend(**problem, out_dtype="float32")
        sink = np.array([-2.0, 0.5, 3.0], np.float32)
        for splits in (None, 2):
            shrunk, other = attend(**problem, sink=sink, num_splits=splits, out_dtype="float32")
            share = 1 / (1 + np.exp(sink[:, None] - lse)).T[:, None, :, None]
            close(shrunk, share * out, attend.dtype)
            close(other, lse)


class TestKeyMass:
    @decode
    def test_is_the_probabilities_summed_over_heads(self, attend):
        """0 where there is no key, where a query sees none, and beyond the request."""
        problem = decode_problem([6, 1, 0], attend.dtype, tokens=2)
        given = {"key_mass": poisoned((3, 2, 11))}
        _, lse, mass = attend(**problem, **given)
        assert mass.shape == (3, 2, 11)
        for b, i, end in ((0, 0, 5), (0, 1, 6), (1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 0)):
            keys = rows_of(problem, b)[:end].astype(np.float64)
            scores = SCALE * problem["q"][b, i].astype(np.float64) @ keys.T
            weights = np.exp(scores - lse.reshape(TINY.N, 3, 2)[:, b, i, None].astype(np.float64))
            close(mass[b, i, :end], weights.sum(axis=0) if end else [], attend.dtype)
            assert not bits_of(mass[b, i, end:]).any()
        totals = np.array([[TINY.N, TINY.N], [0, TINY.N], [0, 0]])
        close(mass.sum(axis=-1), totals, attend.dtype)
        same(given["key_mass"], mass)

    @fast_decode
    def test_of_holes_is_zero_and_sinks_take_their_part(self, attend):
        problem = decode_problem([70, 9], attend.dtype, tokens=2)
        sink = np.array([0.5, -1, 2], np.float32)
        rng = np.random.default_rng(0)
        chosen = rng.choice(slots_of(problem, 0), (2, 2, 60))
        holes = rng.random(chosen.shape) < 0.3
        chosen[holes] = rng.choice([-1, -7, -(2**31)], int(holes.sum()))
        sparse = with_indices(problem, chosen)
        for each, unseen in ((problem, None), (sparse, holes)):
            _, lse, mass = attend(**each, sink=sink, return_key_mass=True)
            kept = (1 / (1 + np.exp(sink[:, None] - lse))).sum(axis=0)
            close(mass.sum(axis=-1).reshape(-1), kept, attend.dtype)
            if unseen is not None:
                assert not bits_of(mass)[unseen].any()
                assert (mass[~unseen] > 0).all()

    @fast_decode
    def test_without_lse_it_is_the_same(self, attend):
        problem = decode_problem([9, 5], attend.dtype) | {"return_key_mass": True}
        out, mass = attend(**problem, return_lse=False)
        want = attend(**problem)
        same(out, want[0])
        same(mass, want[2])
