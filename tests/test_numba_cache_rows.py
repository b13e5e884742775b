"""Cache rows written by Numba's device functions, byte for byte what `CacheFormat.encode` says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import CellType, FunctionType

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sandbox import kernels
from sandbox.cache_formats import FORMATS, Widths
from sandbox.dims import MLADims
from sandbox.kernels import numba_cache_rows, numba_target
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.numba_cache_words import RowWords, row_writer

ROOT = Path(__file__).parent.parent
SIMULATED = numba_target.SIMULATED and numba_target.cuda is not None
simulated = pytest.mark.skipif(
    not SIMULATED, reason="device functions are called from Python in the simulator only"
)

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BF16]
PACKED = [fmt for fmt in FORMATS.values() if fmt.packed]
RULES = [(fmt, rule) for fmt in PACKED for rule in fmt.tile_scales or (None,)]
SCALES = (1.0, 0.1, 0.3, 2.0**-3, 3.7)
OPS = ["concat_insert", "concat_insert_prefill", "concat_insert_decode"]
NO_TABLE = np.zeros(0, np.int64), np.zeros((0, 0), np.float32)


def each_format(rules):
    ids = [f"{fmt.name}-{rule}" if rule else fmt.name for fmt, rule in rules]
    return pytest.mark.parametrize(("fmt", "rule"), rules, ids=ids)


formats = each_format(RULES)
scaled_formats = each_format([pair for pair in RULES if not pair[0].needs_scale])


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def plain(device):
    """A device function as Python alone; the simulator's bookkeeping costs more than the work."""
    if not hasattr(device, "py_func"):
        return device
    function = device.py_func
    cells = tuple(CellType(plain(cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, closure=cells)


def all_bfloat16(columns):
    """Every bf16 there is, by magnitude, so that rows of so many hold values alike."""
    codes = np.arange(65536, dtype=np.uint16)
    codes = codes[np.argsort(codes & 0x7FFF, kind="stable")]
    return codes.view(BF16).reshape(-1, columns)


def by_items(fmt, widths, latents, keys, k_scale=None, rule=None, table=NO_TABLE):
    """Rows `[T, row bytes]` as the scalar kernels write them, one item at a time."""
    write = plain(numba_cache_rows.item_writer(fmt, widths, latents.dtype, rule))
    cache = np.full(fmt.cache_shape(widths, len(latents), 1), 0xA5, np.uint8)
    rows = numba_target.bits(latents), numba_target.bits(keys), scale_array(k_scale)
    for token in range(len(latents)):
        for item in range(numba_cache_rows.item_count(fmt, widths)):
            write(cache, (token, 0), item, token, rows, table)
    return cache[:, 0]


def by_words(fmt, widths, latents, keys, k_scale=None, rule=None, table=NO_TABLE, elements=2):
    """Rows as the vector kernels write them, by three threads a row."""
    lanes = range(3)
    row = RowWords(fmt, widths, latents.dtype, elements, rule, len(lanes))
    measure, settle, write = map(plain, row_writer(row))
    cache = np.full(fmt.cache_shape(widths, len(latents), 1), 0xA5, np.uint8)
    words = cache.view(f"u{row.unit}")
    word = np.dtype(f"u{elements * latents.dtype.itemsize}")
    rows = latents.view(word), keys.view(word), scale_array(k_scale)
    for token in range(len(latents)):
        shared = []
        if row.scales:
            shared = [np.full((row.scales, len(lanes)), 0xFFFFFFFF, np.uint32)]
            for lane in lanes:
                measure(*shared, (token, 0), lane, token, rows, table)
            for lane in lanes:
                settle(*shared, lane)
        for lane in lanes:
            write(words, (token, 0), lane, token, rows, table, *shared)
    return cache[:, 0]


def scale_array(k_scale):
    return np.zeros(0, np.float32) if k_scale is None else np.array([k_scale], np.float32)


def expected(fmt, widths, latents, keys, k_scale=None, rule=None):
    both = np.concatenate([latents.astype(np.float32), keys.astype(np.float32)], axis=1)
    return fmt.encode(both, widths, k_scale=k_scale, tile_scale=rule)


def check(writer, fmt, widths, latents, keys, k_scale=None, rule=None, **options):
    """Every byte, but that a NaN is any NaN in fields that are floats."""
    got = writer(fmt, widths, latents, keys, k_scale, rule, **options)
    want = expected(fmt, widths, latents, keys, k_scale, rule)
    for field in fmt.layout(widths):
        part = slice(field.offset, field.offset + field.nbytes)
        left, right = np.ascontiguousarray(got[:, part]), np.ascontiguousarray(want[:, part])
        if field.name.endswith("scale") or field.name.endswith("scales") or field.dtype == BF16:
            left, right = left.view(field.dtype), right.view(field.dtype)
            both_nan = np.isnan(left) & np.isnan(right)
            bits = f"u{field.dtype.itemsize}"
            left, right = (np.where(both_nan, 0, x.view(bits)) for x in (left, right))
        np.testing.assert_array_equal(left, right, err_msg=field.name)


def scale_of(fmt):
    return 0.3 if fmt.needs_scale else None


@simulated
class TestEveryBfloat16:
    @pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
    @pytest.mark.parametrize("k_scale", SCALES)
    def test_per_tensor(self, name, k_scale):
        fmt, values = FORMATS[name], all_bfloat16(65536)
        code = plain(numba_cache_rows.coder(fmt))
        floats, scale = values.astype(np.float32), np.float32(k_scale)
        codes = np.array([code(value, scale) for value in floats[0]])
        want = fmt.encode(values, Widths(65536, 0), k_scale=k_scale)
        np.testing.assert_array_equal(codes, want[0])

    @scaled_formats
    def test_in_the_latent_by_items(self, fmt, rule):
        latents = all_bfloat16(128)
        check(by_items, fmt, Widths(128, 0), latents, latents[:, :0], rule=rule)

    @scaled_formats
    def test_a_quarter_of_them_in_latent_and_key_by_words(self, fmt, rule):
        values = all_bfloat16(128)[::4]
        keys = np.ascontiguousarray(values[::-1, :64])
        check(by_words, fmt, Widths(128, 64), values, keys, rule=rule, elements=4)


@simulated
@formats
@pytest.mark.parametrize("writer", [by_items, by_words])
class TestAnyRow:
    @settings(max_examples=12, deadline=None)
    @given(values=arrays(np.uint32, (2, 128 + 8), elements=st.integers(0, 2**32 - 1)))
    def test_any_float32_bits(self, fmt, rule, writer, values):
        floats = values.view(np.float32)
        latents, keys = np.ascontiguousarray(floats[:, :128]), np.ascontiguousarray(floats[:, 128:])
        check(writer, fmt, Widths(128, 8), latents, keys, scale_of(fmt), rule)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_each_dtype(self, fmt, rule, writer, dtype, rng):
        latents, keys = (rng.standard_normal((2, n)).astype(dtype) for n in (256, 8))
        check(writer, fmt, Widths(256, 8), latents, keys, scale_of(fmt), rule)

    def test_edges(self, fmt, rule, writer):
        """Tiles of nothing, of one hostile value, of ties, of the smallest and the largest."""
        rows = [np.zeros(128), np.full(128, -0.0), np.full(128, np.nan), np.full(128, -np.inf)]
        for value in (np.nan, np.inf, -np.inf, 1e-45, 1e-40, 3.4e38, 448, 448 * 2.0**-13):
            rows.append(np.r_[np.linspace(-1, 1, 127), value])
        for value in (448 * 2.0**3, 0.0448):  # a scale that is, or is just not, a power of two
            for direction in (-np.inf, np.inf):
                rows.append(np.full(128, np.nextafter(np.float32(value), np.float32(direction))))
        for largest in (127, 7, 448):
            rows.append(np.r_[np.arange(127) % (2 * largest) / 2 - largest / 2, largest])
        rows.append(np.full(128, 1e-42))
        latents = np.array(rows, np.float32)
        keys = np.roll(latents[:, -8:], 1, axis=0)
        check(writer, fmt, Widths(128, 8), latents, keys, scale_of(fmt), rule)

    def test_rotated_keys_are_rounded_once(self, fmt, rule, writer, rng):
        latents, keys = (rng.standard_normal((6, n)).astype(BF16) for n in (128, 16))
        angles = rng.uniform(-3, 3, (8, 8)).astype(np.float32)
        cosine, sine = np.cos(angles), np.sin(angles)
        positions = np.array([3, 0, 7, -1, 8, 2])
        turned = np.full(keys.shape, np.nan, np.float32)
        for token in (0, 1, 2, 5):  # the others have no place in the table
            even, odd = (keys[token, start::2].astype(np.float32) for start in (0, 1))
            c, s = cosine[positions[token]], sine[positions[token]]
            turned[token, 0::2], turned[token, 1::2] = even * c - odd * s, even * s + odd * c
        table = positions, np.concatenate([cosine, sine], axis=1)
        widths, k_scale = Widths(128, 16), scale_of(fmt)
        got = writer(fmt, widths, latents, keys, k_scale, rule, table=table)
        want = expected(fmt, widths, latents, turned, k_scale, rule)
        np.testing.assert_array_equal(got, want)


@simulated
@formats
def test_odd_widths_by_items(fmt, rule, rng):
    """Widths that no word of four divides; per tensor an odd one too."""
    widths = Widths(43 if fmt.needs_scale else 42, 6) if not fmt.tile_scales else Widths(384, 2)
    latents, keys = (rng.standard_normal((3, n)).astype(BF16) for n in (widths.L, widths.R))
    check(by_items, fmt, widths, latents, keys, scale_of(fmt), rule)


@simulated
def test_slots_without_a_row():
    find = plain(numba_cache_rows.row_finder())
    cache = np.zeros((5, 4, 1), np.uint8)
    slots = np.array([0, 7, 19, -1, -(2**62), 20, 2**62])
    found = [find(token, slots, cache) for token in range(len(slots) + 1)]
    assert found == [(0, 0), (1, 3), (4, 3)] + [(-1, -1)] * 5


@simulated
@pytest.mark.parametrize("name", OPS)
def test_nobody_with_widths_that_no_word_divides(name):
    dims = MLADims(3, 56, 43, 25, 6, 17)
    case = Case(dims, "odd", BF16, Workload("nobody", (), ()), {"block_size": 4, "views": False})
    arguments = kernels.OPS[name].make_inputs(case, np)
    arguments["cache"] = arguments["cache"][:0]
    kernels.OPS[name](**arguments, variant="numba_vector")


def test_kernels_are_single_precision_and_need_no_stack():
    """`int32 * float32` is float64 in Numba, and none of the simulator's business."""
    problems = [
        *("concat_insert:-short", "concat_insert:fp8_e4m3", "concat_insert:fp8_ds_mla"),
        *("concat_insert:int4_per_token", "concat_insert_prefill:-short"),
        *("concat_insert_prefill_fp8:fp8_e4m3", "concat_insert_decode:fp8_query"),
        *("gather:", "linear:", "lse_merge:", "lse_merge_k:", "prefill_attention:-ragged"),
        *("prefill_attention:fp8", "decode_attention:tree", "decode_attention:topk"),
        *("decode_attention:fp8_ds_mla", "decode_attention:int4_per_token"),
        *("quantize_static:", "quantize_groups:", "quantize_nvfp4:"),
    ]
    command = [sys.executable, "tests/numba_ptx.py", *problems]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if run.returncode and run.stderr.startswith("cannot compile: "):
        pytest.skip(run.stderr.strip())
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for op, _, part in (problem.partition(":") for problem in problems):
        assert any(name.startswith(f"{op} ") and part in name for name in found), op
    assert not {name: lines[:3] for name, lines in found.items() if lines}
