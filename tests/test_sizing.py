"""What a cache takes and holds, and the descale that fits its data."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sandbox
from sandbox.cache_formats import FORMATS, Capacity, Widths, finite_amax
from sandbox.dims import PRESETS

V3 = PRESETS["deepseek_v3"]
SCALED = ("fp8_e4m3", "fp8_e5m2")
BYTES = {
    "float32": (2304, 140_544),
    "bfloat16": (1152, 70_272),
    "float16": (1152, 70_272),
    "fp8_e4m3": (576, 35_136),
    "fp8_e5m2": (576, 35_136),
    "fp8_ds_mla": (656, 40_016),
    "int8_per_token": (584, 35_624),
    "int4_per_token": (296, 18_056),
}


def random_rows(seed, key_size=3.0, tokens=9):
    rng = np.random.default_rng(seed)
    kv_c = rng.standard_normal((tokens, 40), np.float32)
    return kv_c, np.float32(key_size) * rng.standard_normal((tokens, 8), np.float32)


@pytest.mark.parametrize("cache_format", FORMATS)
def test_bytes_per_token_of_deepseek_v3(cache_format):
    layer, layers61 = BYTES[cache_format]
    assert sandbox.bytes_per_token(cache_format, V3) == layer
    assert sandbox.bytes_per_token(cache_format, V3, num_layers=61) == layers61


def test_capacity_by_hand():
    # A block: 64 tokens * 40,016 bytes = 2,561,024 bytes; 1 GiB = 419 * 2,561,024 + 672,768.
    found = sandbox.capacity(2**30, "fp8_ds_mla", V3, block_size=64, num_layers=61)
    assert found == Capacity(419, 26_816, 1_073_069_056, 672_768)
    spread = sandbox.capacity(2**30, "fp8_ds_mla", V3, block_size=64, num_layers=61, ranks=8)
    assert spread == Capacity(419, 8 * 26_816, 1_073_069_056, 672_768)


def test_capacity_at_the_edge_of_a_block():
    block = 16 * 576
    for memory, blocks in [(0, 0), (block - 1, 0), (block, 1), (2 * block - 1, 1)]:
        found = sandbox.capacity(memory, "fp8_e4m3", V3, block_size=16)
        assert found == Capacity(blocks, 16 * blocks, blocks * block, memory - blocks * block)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"memory_bytes": -1}, ValueError, "memory_bytes is -1, expected at least 0"),
        ({"memory_bytes": 1e9}, TypeError, "memory_bytes is 1000000000.0, expected an integer"),
        ({"block_size": 0}, ValueError, "block_size is 0, expected at least 1"),
        ({"block_size": True}, TypeError, "block_size is True"),
        ({"num_layers": 0}, ValueError, "num_layers is 0"),
        ({"ranks": 0}, ValueError, "ranks is 0"),
        ({"cache_format": "fp8"}, ValueError, "cache_format is 'fp8', expected one of float32"),
        ({"cache_format": None}, TypeError, "cache_format is NoneType"),
        ({"cache_format": "fp8_ds_mla", "dims": Widths(40, 8)}, ValueError, "multiple of 128"),
    ],
)
def test_capacity_refuses(changes, error, message):
    given = {"memory_bytes": 10**6, "cache_format": "bfloat16", "dims": V3, "block_size": 16}
    with pytest.raises(error, match=re.escape(message)):
        sandbox.capacity(**{**given, **changes})


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_k_scale_is_the_largest_value_over_the_largest_code(name, largest):
    kv_c, k_pe = np.array([[1.0, -2.0]], np.float32), np.array([[0.5, -6.0]], np.float32)
    assert sandbox.choose_k_scale(kv_c, k_pe, name) == np.float32(6) / np.float32(largest)
    assert sandbox.choose_k_scale(-4 * kv_c, k_pe, name) == np.float32(8) / np.float32(largest)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("key_size", [0.0, 0.01, 3.0, 1e4])
def test_with_the_chosen_scale_nothing_saturates_and_the_largest_code_is_used(name, key_size):
    kv_c, k_pe = random_rows(1, key_size)
    rows, widths = np.concatenate([kv_c, k_pe], axis=1), Widths(40, 8)
    fmt, scale = FORMATS[name], sandbox.choose_k_scale(kv_c, k_pe, name)
    assert scale == np.float32(scale)
    codes = fmt.encode(rows, widths, k_scale=scale)
    read = fmt.decode(codes, widths, k_scale=scale)
    step = 2.0 ** -(4 if name == "fp8_e4m3" else 3)
    assert np.abs(read - rows).max() <= step * np.abs(rows).max()
    assert (codes & 0x7F).max() == {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}[name]


def test_values_that_are_not_finite_do_not_count():
    kv_c, k_pe = random_rows(2)
    scale = sandbox.choose_k_scale(kv_c, k_pe, "fp8_e4m3")
    dirty = np.concatenate([kv_c, np.full((1, 40), np.nan, np.float32)])
    dirty[-1, 0], dirty[-1, 1] = np.inf, -np.inf
    assert sandbox.choose_k_scale(dirty, k_pe, "fp8_e4m3") == scale


@pytest.mark.parametrize("fill", [0.0, -0.0, np.nan, np.inf])
def test_nothing_to_measure_gives_one(fill):
    kv_c, k_pe = np.full((2, 40), fill, np.float32), np.zeros((2, 0), np.float32)
    assert sandbox.choose_k_scale(kv_c, k_pe, "fp8_e4m3") == 1.0
    assert sandbox.choose_k_scale(kv_c[:0], k_pe[:0], "fp8_e5m2") == 1.0


def test_the_smallest_values_give_a_scale_that_can_be_divided_by():
    least = np.full((1, 40), np.finfo(np.float32).smallest_subnormal)
    assert sandbox.choose_k_scale(least, least, "fp8_e5m2") == np.finfo(np.float32).tiny


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 99))
def test_chunks_give_the_scale_of_the_whole(lengths, seed):
    kv_c, k_pe = random_rows(seed, tokens=sum(lengths))
    amax, start = 0.0, 0
    for length in lengths:
        chunk = kv_c[start : start + length], k_pe[start : start + length]
        scale = sandbox.choose_k_scale(*chunk, "fp8_e4m3", amax=amax)
        amax = finite_amax(*chunk, earlier=amax)
        start += length
    assert scale == sandbox.choose_k_scale(kv_c, k_pe, "fp8_e4m3")


def test_arrays_of_any_kind_and_element_type():
    torch = pytest.importorskip("torch")
    kv_c, k_pe = (x.astype(ml_dtypes.bfloat16) for x in random_rows(3))
    scale = sandbox.choose_k_scale(kv_c, k_pe, "fp8_e4m3")
    tensors = [torch.tensor(x.astype(np.float32)).to(torch.bfloat16) for x in (kv_c, k_pe)]
    assert sandbox.choose_k_scale(*tensors, "fp8_e4m3") == scale
    views = [x.astype(np.float64)[:, ::-1].T for x in (kv_c, k_pe)]
    assert sandbox.choose_k_scale(*views, "fp8_e4m3") == scale
    too_large = np.array([[1e300, 2.0]])
    assert finite_amax(too_large, too_large) == 2.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_format": "fp8_ds_mla"}, ValueError, "expected fp8_e4m3 or fp8_e5m2"),
        ({"cache_format": "int8_per_token"}, ValueError, "no per-tensor scale"),
        ({"cache_format": "fp8"}, ValueError, "cache_format is 'fp8'"),
        ({"amax": -1.0}, ValueError, "is -1.0, expected a finite magnitude"),
        ({"amax": float("nan")}, ValueError, "is nan"),
        ({"amax": float("inf")}, ValueError, "is inf"),
        ({"k_pe": np.zeros((2, 8), np.uint8)}, TypeError, "k_pe is uint8"),
        ({"kv_c": [[1.0]]}, TypeError, "kv_c"),
        ({"kv_c": None}, TypeError, "kv_c is NoneType"),
    ],
)
def test_choose_k_scale_refuses(change, error, message):
    kv_c, k_pe = random_rows(4)
    given = {"kv_c": kv_c, "k_pe": k_pe, "cache_format": "fp8_e4m3"}
    with pytest.raises(error, match=re.escape(message)):
        sandbox.choose_k_scale(**{**given, **change})
