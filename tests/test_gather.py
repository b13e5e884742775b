"""What is special to gather: refusals, field cases, random batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels import gather


def paged(blocks=6, block_size=4, width=8, dtype=np.float32):
    count = blocks * block_size * width
    return np.arange(count, dtype=np.float32).reshape(blocks, block_size, width).astype(dtype)


def table(*rows):
    return np.array(rows, dtype=np.int32)


def ints(*values):
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("variant", here(gather, but=["raw_unfused"]))  # restores only
class TestFieldCases:
    def test_start_inside_a_block(self, variant):
        cache = paged()
        out = gather(
            cache, table([5, 2, 9]), ints(0, 5), seq_starts=ints(2), num_tokens=5, variant=variant
        )
        rows = cache.reshape(-1, 8)
        np.testing.assert_array_equal(out, rows[[22, 23, 8, 9, 10]])

    def test_first_row_after_zero_and_an_empty_request_between(self, variant):
        cache, out = paged(), np.full((8, 8), -1, np.float32)
        gather(cache, table([1], [0], [3]), ints(2, 4, 4, 6), out=out, variant=variant)
        rows = cache.reshape(-1, 8)
        np.testing.assert_array_equal(out[2:6], rows[[4, 5, 12, 13]])
        assert (out[[0, 1, 6, 7]] == -1).all()

    def test_table_row_too_short_reads_zeros_and_nothing_else(self, variant):
        wide = np.full((2, 1030), 4, np.int32)
        wide[0] = 1
        cache = paged(5, 16, 8) + 1
        out = gather(
            cache,
            wide[:, :1024],
            ints(0, 3, 837),
            seq_starts=ints(0, 15967),
            num_tokens=837,
            variant=variant,
            check_values=False,
        )
        inside = 1024 * 16 - 15967
        assert (out[3 + inside :] == 0).all()
        np.testing.assert_array_equal(out[3 : 3 + inside][0], cache[4, 15967 % 16])
        assert (out[: 3 + inside] > 0).all()

    def test_ids_outside_the_cache_give_zeros(self, variant):
        out = gather(
            paged() + 1,
            table([-1, 6, 2]),
            ints(0, 9),
            num_tokens=9,
            variant=variant,
            check_values=False,
        )
        assert (out[:8] == 0).all()
        assert (out[8] > 0).all()

    @pytest.mark.parametrize("rows", [0, 1, 33])
    def test_sizes_around_a_block_of_threads(self, variant, rows):
        cache = paged(40, 1, 8, bfloat16)
        ids = np.arange(39, 39 - rows, -1)
        ids = np.concatenate([ids, [99]]).astype(np.int32)[None]
        out = gather(cache, ids, ints(0, rows), variant=variant)
        np.testing.assert_array_equal(out, cache[ids[0, :rows], 0])

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(
        lens=st.lists(st.integers(0, 7), max_size=4),
        block_size=st.integers(1, 5),
        seed=st.integers(0, 9),
    )
    def test_random_batches(self, variant, lens, block_size, seed):
        rng = np.random.default_rng(seed)
        starts = rng.integers(0, 6, len(lens)).astype(np.int32)
        columns = max([-(-(s + n) // block_size) for s, n in zip(starts, lens)], default=0) + 1
        cache = paged(9, block_size, 4)
        ids = rng.integers(0, 9, (len(lens), columns)).astype(np.int32)
        bounds = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        out = gather(cache, ids, bounds, seq_starts=starts, variant=variant)
        expected = [
            cache[ids[b, p // block_size], p % block_size]
            for b, n in enumerate(lens)
            for p in range(starts[b], starts[b] + n)
        ]
        np.testing.assert_array_equal(out, np.array(expected, np.float32).reshape(-1, 4))


GOOD = {
    "cache": paged(),
    "block_table": table([0, 1], [2, 3]),
    "cu_seq_lens": ints(0, 4, 10),
    "num_tokens": 10,
}


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"cache": paged(dtype=np.float64)}, TypeError, "cache"),
        ({"cache": paged()[0]}, ValueError, "cache"),
        ({"cache": paged()[..., ::2]}, ValueError, "cache"),
        ({"cache": paged()[::-1]}, ValueError, "cache"),
        ({"cache": [[1.0]]}, TypeError, "cache"),
        ({"cache": None}, TypeError, "cache"),
        ({"block_table": GOOD["block_table"].astype(np.int64)}, TypeError, "block_table"),
        ({"block_table": ints(0, 1)}, ValueError, "block_table"),
        ({"block_table": table([0], [2])}, ValueError, "block_table"),
        ({"block_table": table([0, 1], [2, 6])}, ValueError, "block_table"),
        ({"block_table": table([0, 1], [2, -1])}, ValueError, "block_table"),
        ({"cu_seq_lens": ints(0, 4)}, ValueError, "cu_seq_lens"),
        ({"cu_seq_lens": ints(0, 4, 3)}, ValueError, "cu_seq_lens"),
        ({"cu_seq_lens": ints(0, 4, 10).astype(np.uint64)}, TypeError, "cu_seq_lens"),
        ({"seq_starts": ints(0)}, ValueError, "seq_starts"),
        ({"seq_starts": ints(0, -1)}, ValueError, "seq_starts"),
        ({"seq_starts": ints(0, 5)}, ValueError, "block_table"),
        ({"num_tokens": 9}, ValueError, "num_tokens"),
        ({"num_tokens": 10.0}, TypeError, "num_tokens"),
        ({"num_tokens": -1}, ValueError, "num_tokens"),
        ({"out": np.zeros((9, 8), np.float32)}, ValueError, "out"),
        ({"out": np.zeros((10, 9), np.float32)}, ValueError, "out"),
        ({"out": np.zeros((10, 8), np.float16)}, TypeError, "out"),
        ({"out": np.zeros((10, 16), np.float32)[:, ::2]}, ValueError, "out"),
        ({"out": np.broadcast_to(np.float32(0), (10, 8))}, ValueError, "out"),
        ({"out": GOOD["cache"].reshape(24, 8)[:10]}, ValueError, "out shares memory"),
        ({"out": as_strided(np.zeros(99, np.float32), (10, 8), (4, 4))}, ValueError, "out has str"),
        ({"variant": "no such"}, ValueError, "no such"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(change, error, names):
    out = np.full((10, 8), 7, np.float32)
    with pytest.raises(error, match=names):
        gather(**{**GOOD, "out": out, **change})
    assert (out == 7).all()


def test_torch_tensors_come_back_as_torch_tensors():
    torch = pytest.importorskip("torch")
    cache = torch.nn.Parameter(torch.arange(192.0).reshape(6, 4, 8).to(torch.bfloat16))
    ids = torch.tensor([[5, 1]], dtype=torch.int32)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    out = gather(cache, ids, bounds, num_tokens=6)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.cat([cache[5], cache[1, :2]]))
    workspace = torch.zeros(9, 8, dtype=torch.bfloat16)
    assert gather(cache, ids, bounds, num_tokens=6, out=workspace) is workspace
    assert torch.equal(workspace[:6], out)
    assert not workspace[6:].any()
