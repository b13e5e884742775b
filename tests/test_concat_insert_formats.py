"""Packed rows: the bytes of every format, scales, refusals and identities, for every variant."""

import ml_dtypes
import numpy as np
import pytest
from concat_insert_problems import every_variant, problem, same_bits

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3, FORMATS, Widths
from sandbox.kernels import (
    Unavailable,
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
)
from sandbox.kernels.concat_insert import cases, reference
from sandbox.kernels.cuda.kernel import record_launches

OPS = (concat_insert, concat_insert_decode)
WRITERS = [
    pytest.param(name, rule, id=f"{name}-{rule}" if rule else name)
    for name, fmt in FORMATS.items()
    if fmt.packed
    for rule in fmt.tile_scales or (None,)
]
every_writer = pytest.mark.parametrize(("fmt", "rule"), WRITERS)
SCALES = (1, 0.1, 0.3, 2**-3, 3.7, 2.0**-126, 1e-30, 1e37)
"""With the last three a reciprocal or a remainder may underflow."""


def dims_of(name):
    """Small dims that the format has a layout for: L = 40 or 256, R = 8."""
    return cases.TILED if FORMATS[name].tile_scales else "tiny"


def insert(variant, kv_c, k_pe, fmt, **scales):
    """What the variant stores of each row, in order; all other bytes stay as they were."""
    fmt = FORMATS[fmt]
    rows = len(kv_c)
    width = fmt.row_bytes(Widths(kv_c.shape[1], k_pe.shape[1]))
    cache = np.full((rows // 4 + 2, 4, width), 0xA5, np.uint8)
    slots = np.random.default_rng(rows).permutation(rows) + 4
    try:
        concat_insert(*(kv_c, k_pe, cache, slots), cache_format=fmt.name, variant=variant, **scales)
    except Unavailable as refusal:
        pytest.skip(str(refusal))
    stored = cache.reshape(-1, width)
    assert (np.delete(stored, slots, axis=0) == 0xA5).all()
    return stored[slots]


def encoded(kv_c, k_pe, fmt, **scales):
    rows = np.concatenate([kv_c.astype(np.float32), k_pe.astype(np.float32)], axis=1)
    return FORMATS[fmt].encode(rows, Widths(kv_c.shape[1], k_pe.shape[1]), **scales)


def options(fmt, k_scale, rule):
    """The scales that a format takes."""
    return {"k_scale": k_scale} if FORMATS[fmt].needs_scale else {"tile_scale": rule}


def scales_of(fmt):
    return SCALES if FORMATS[fmt].needs_scale else (None,)


def ties(fmt, scale):
    """The values halfway between two codes, times the scale."""
    if fmt.startswith("int"):
        largest = 127 if fmt.startswith("int8") else 7
        codes = np.arange(-largest, largest + 1, dtype=np.float64)
    else:
        dtype = ml_dtypes.float8_e5m2 if fmt == "fp8_e5m2" else ml_dtypes.float8_e4m3fn
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
        codes = np.unique(codes[np.isfinite(codes)])
    return ((codes[1:] + codes[:-1]) / 2 * np.float64(scale)).astype(np.float32)


def neighbours(values):
    """Each float32 and the four next to it."""
    found = [values]
    for direction in (-np.inf, np.inf):
        near = np.nextafter(values, np.float32(direction))
        found += [near, np.nextafter(near, np.float32(direction))]
    return np.concatenate(found)


@every_variant(concat_insert, kinds=("cuda", "torch"))
@every_writer
class TestCodes:
    def test_every_bfloat16(self, op, variant, fmt, rule):
        values = np.arange(2**16, dtype=np.uint16).view(bfloat16)
        values = np.resize(values, (128, 576))
        kv_c, k_pe = values[:, :512].copy(), values[:, 512:].copy()
        for k_scale in scales_of(fmt):
            scales = options(fmt, k_scale, rule)
            stored = insert(variant, kv_c, k_pe, fmt, **scales)
            np.testing.assert_array_equal(stored, encoded(kv_c, k_pe, fmt, **scales))

    def test_float32_around_every_tie(self, op, variant, fmt, rule):
        rng = np.random.default_rng(7)
        if FORMATS[fmt].needs_scale:
            for k_scale in rng.uniform(0.5, 1, 12).astype(np.float32):
                values = np.resize(neighbours(ties(fmt, k_scale)), (56, 48))
                self._same(variant, values, 40, fmt, k_scale=k_scale)
            return
        latent, group, most = (256, 128, 448) if rule else (40, 40, 127 if "8" in fmt else 7)
        amax = rng.uniform(1, 2, 200).astype(np.float32) * np.exp2(rng.integers(-9, 9, 200))
        values = np.empty((200, latent + 8), np.float32)
        for row, largest in zip(values, amax.astype(np.float32)):
            picked = rng.choice(neighbours(ties(fmt, largest / np.float32(most))), len(row))
            row[:] = np.clip(picked, -largest, largest)
            row[::group] = largest
        self._same(variant, values, latent, fmt, tile_scale=rule)

    def _same(self, variant, values, latent, fmt, **scales):
        kv_c, k_pe = values[:, :latent].copy(), values[:, latent:].copy()
        stored = insert(variant, kv_c, k_pe, fmt, **scales)
        np.testing.assert_array_equal(stored, encoded(kv_c, k_pe, fmt, **scales))


@every_variant(concat_insert, kinds=("cuda", "torch"))
def test_quotients_next_to_the_last_that_round_to_a_tie(op, variant):
    """x / scale within 2^-33 of halfway between k + 1 / 2 and the float32 next to it, where a
    quotient that is not the IEEE one could fall on the other side."""
    rng = np.random.default_rng(3)
    tie = rng.integers(0, 126, 2**19) + 0.5
    half_step = np.spacing(tie.astype(np.float32)).astype(np.float64) / 2
    boundary = tie + rng.choice([-1, 1], len(tie)) * half_step
    x = rng.uniform(1, 2, len(tie)).astype(np.float32)
    scale = (x / boundary).astype(np.float32)
    amax = (np.float64(127) * scale).astype(np.float32)
    near = np.abs(x / boundary / scale - 1) < 2.0**-33
    near &= amax / np.float32(127) == scale
    assert near.sum() > 500
    kv_c = np.zeros((near.sum(), 40), np.float32)
    kv_c[:, 0], kv_c[:, 1], kv_c[:, 2] = amax[near], x[near], -x[near]
    k_pe = np.zeros((len(kv_c), 8), np.float32)
    stored = insert(variant, kv_c, k_pe, "int8_per_token")
    np.testing.assert_array_equal(stored, encoded(kv_c, k_pe, "int8_per_token"))


@every_variant(*OPS)
class TestRows:
    @every_writer
    def test_first_slot_skipped_slots_and_slots_beyond(self, op, variant, fmt, rule):
        arguments = problem(op, bfloat16, dims=dims_of(fmt), format=fmt, tile_scale=rule)
        width = arguments["cache"].shape[2]
        arguments["kv_c"][0, :3] = np.nan
        for slot in (0, 7):
            pool = np.full((9 * 4, width), 0xA5, np.uint8)
            arguments["cache"] = pool[8:28].reshape(5, 4, width)
            arguments["slot_mapping"][:] = [slot, -1, 20]
            run(op, variant, arguments)
            assert (np.delete(pool, 8 + slot, axis=0) == 0xA5).all()
            assert not (pool[8 + slot] == 0xA5).all()

    @every_writer
    def test_twice_and_inputs_stay(self, op, variant, fmt, rule):
        arguments = problem(op, bfloat16, dims=dims_of(fmt), format=fmt, tile_scale=rule)
        before = {n: a.copy() for n, a in arguments.items() if isinstance(a, np.ndarray)}
        run(op, variant, arguments)
        once = arguments["cache"].copy()
        run(op, variant, arguments)
        assert same_bits(arguments["cache"], once)
        for name in set(before) - {"cache"}:
            assert same_bits(arguments[name], before[name]), name

    def test_k_scale_as_a_number_or_an_array_of_one(self, op, variant):
        given = [0.37, np.float64(0.37), np.float32(0.37), np.array(0.37), np.float32([0.37])]
        torch = pytest.importorskip("torch")
        given += [torch.tensor(0.37), torch.tensor([0.37], dtype=torch.float64)]
        stored = []
        for k_scale in given:
            arguments = problem(op, bfloat16, format="fp8_e4m3")
            run(op, variant, {**arguments, "k_scale": k_scale})
            stored.append(arguments["cache"].copy())
        assert all(same_bits(stored[0], other) for other in stored[1:])
        half = problem(op, bfloat16, format="fp8_e4m3")
        run(op, variant, {**half, "k_scale": 0.185})
        assert not same_bits(half["cache"], stored[0])

    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_ds_mla_keys_are_bfloat16_whatever_comes_in(self, op, variant, dtype):
        arguments = problem(op, dtype, dims=cases.TILED, format="fp8_ds_mla")
        arguments = unturned(arguments) if op is not concat_insert else arguments
        run(op, variant, arguments)
        rows = arguments["cache"].reshape(-1, 280)[arguments["slot_mapping"]]
        keys = np.ascontiguousarray(rows[:, 264:]).view(bfloat16)
        assert same_bits(keys, arguments["k_pe"][:3].astype(bfloat16))


def unturned(arguments):
    """The arguments with a table of no angle at all."""
    return {**arguments, "cos_sin": np.tile(np.float32([1] * 4 + [0] * 4), (20, 1))}


def run(op, variant, arguments):
    try:
        return op(**arguments, variant=variant, check_values=False)
    except Unavailable as refusal:
        pytest.skip(str(refusal))


@every_variant(concat_insert)
@pytest.mark.parametrize(("rule", "scale"), [("pow2", 1.0), ("raw", 0.75)])
def test_tile_scales_stand_behind_the_codes(op, variant, rule, scale):
    """An amax of 336 in the first tile, nothing in the second one; then 448 and the next number."""
    arguments = problem(op, bfloat16, dims=cases.TILED, format="fp8_ds_mla", tile_scale=rule)
    kv_c = arguments["kv_c"]
    kv_c[...] = 0
    kv_c[0, :2] = -336, 3
    kv_c[1, 1] = np.inf
    kv_c[1, 2:4] = 336, np.nan
    kv_c[2, 5], kv_c[2, 128] = 448, 450
    op(**arguments, variant=variant)
    rows = arguments["cache"].reshape(-1, 280)[arguments["slot_mapping"]]
    scales = np.ascontiguousarray(rows[:, 256:264]).view(np.float32)
    nothing = 2.0**-13 if rule == "pow2" else np.finfo(np.float32).tiny
    above = 2 if rule == "pow2" else np.float32(450) / np.float32(448)
    assert scales.tolist() == [[scale, nothing], [scale, nothing], [1, above]]
    expected = E4M3.encode(np.float32([[-336 / scale, 3 / scale], [0, np.inf]]))
    assert rows[:2, :2].tolist() == expected.tolist()
    assert rows[1, 3] == 0x7F
    assert not rows[:2, 4:256].any()


@every_variant(concat_insert_decode)
class TestDecode:
    @pytest.mark.parametrize("fmt", [None, "fp8_e4m3", "fp8_ds_mla", "int4_per_token"])
    def test_query_codes_are_products_with_the_reciprocal(self, op, variant, fmt):
        changes = {} if fmt is None else {"format": fmt}
        arguments = problem(op, dims=dims_of(fmt or "bfloat16"), fp8_query=True, **changes)
        descale = np.float32(0.3)
        arguments = {**unturned(arguments), "q_descale": descale}
        edges = np.float32(cases.EDGES)
        arguments["ql_nope"][1, 1, : len(edges)] = edges * descale
        heads = [arguments["ql_nope"][:3], arguments["q_pe"][:3]]
        q_out = run(op, variant, arguments)
        values = np.concatenate(heads, axis=-1)
        with np.errstate(over="ignore"):
            expected = E4M3.encode(values * (np.float32(1) / descale))
        np.testing.assert_array_equal(q_out, expected)

    def test_a_rotated_key_inserted_is_the_key_rotated_while_inserting(self, op, variant):
        """In bfloat16, where the row of fp8_ds_mla rounds the key as the plain row does."""
        plain = problem(op, bfloat16, dims=cases.TILED)
        run(op, variant, plain)
        rotated = plain["cache"].reshape(-1, 264)[plain["slot_mapping"], 256:]
        fused = problem(op, bfloat16, dims=cases.TILED, format="fp8_ds_mla")
        run(op, variant, fused)
        apart = problem(op, bfloat16, dims=cases.TILED, format="fp8_ds_mla")
        run(op, variant, {**unturned(apart), "k_pe": rotated})
        slots = fused["slot_mapping"]
        rows = [each["cache"].reshape(-1, 280)[slots] for each in (fused, apart)]
        assert same_bits(*rows)
        assert not same_bits(rotated, plain["k_pe"][:3])

    def test_rotated_keys_are_not_rounded_before_their_codes(self, op, variant):
        """A key whose rotation lies between two codes and rounds to their tie in 16 bits."""
        arguments = problem(op, bfloat16, format="fp8_e4m3")
        arguments["k_scale"] = 1.0
        arguments["k_pe"][:3] = np.tile([1, 0.0625], 4)
        arguments["cos_sin"] = np.tile(np.float32([1.0625] * 4 + [-(2**-8)] * 4), (20, 1))
        turned = reference.rope(
            arguments["k_pe"][:3], arguments["positions"][:3], arguments["cos_sin"]
        )
        run(op, variant, arguments)
        rows = arguments["cache"].reshape(-1, 48)[arguments["slot_mapping"]]
        exact, twice = (
            E4M3.encode(x.astype(np.float32)) for x in (turned, turned.astype(bfloat16))
        )
        assert not (exact == twice).all()
        np.testing.assert_array_equal(rows[:, 40:], exact)


@pytest.mark.parametrize("variant", ["raw_fused", "raw_element"])
@pytest.mark.parametrize("fp8_query", [False, True])
@pytest.mark.parametrize("fmt", [None, *(name for name in FORMATS if FORMATS[name].packed)])
def test_decode_is_one_launch_whatever_the_query_and_the_cache(variant, fp8_query, fmt):
    op = concat_insert_decode
    if reason := op.variants[variant].unavailable("host"):
        pytest.skip(reason)
    changes = {} if fmt is None else {"format": fmt}
    arguments = problem(
        op, bfloat16, dims=dims_of(fmt or "bfloat16"), fp8_query=fp8_query, **changes
    )
    with record_launches() as launches:
        op(**arguments, variant=variant)
    assert len(launches) == 1


REFUSALS = {
    "rows of another format": ("fp8_ds_mla", np.zeros((5, 4, 576), np.uint8), {}, "fp8_ds_mla"),
    "rows too wide": ("fp8_e4m3", np.zeros((5, 4, 656), np.uint8), {}, "fp8_e4m3"),
    "elements of another type": ("fp8_ds_mla", np.zeros((5, 4, 656), np.int8), {}, "fp8_ds_mla"),
    "elements of 16 bits": ("fp8_ds_mla", np.zeros((5, 4, 656), bfloat16), {}, "fp8_ds_mla"),
    "every other byte": ("fp8_ds_mla", np.zeros((5, 4, 1312), np.uint8)[..., ::2], {}, "cache"),
    "odd address": (
        "fp8_ds_mla",
        np.zeros((5, 4, 658), np.uint8)[..., 1:657],
        {},
        "4 bytes, which fp8_ds_mla needs",
    ),
    "no scale": ("fp8_e4m3", np.zeros((5, 4, 576), np.uint8), {}, "k_scale is missing"),
    "a scale too many": ("fp8_ds_mla", np.zeros((5, 4, 656), np.uint8), {"k_scale": 1}, "k_scale"),
    "a rule too many": (
        "int8_per_token",
        np.zeros((5, 4, 584), np.uint8),
        {"tile_scale": "pow2"},
        "tile_scale",
    ),
    "an unknown rule": (
        "fp8_ds_mla",
        np.zeros((5, 4, 656), np.uint8),
        {"tile_scale": "up"},
        "'up'",
    ),
    "an unknown format": ("fp9", np.zeros((5, 4, 656), np.uint8), {}, "fp9"),
    "two scales": (
        "fp8_e5m2",
        np.zeros((5, 4, 576), np.uint8),
        {"k_scale": np.float32([1, 2])},
        "k_scale",
    ),
    "a scale of zero": ("fp8_e5m2", np.zeros((5, 4, 576), np.uint8), {"k_scale": 0}, "k_scale"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bad_caches_and_scales_are_refused_by_the_formats_name(op, name):
    fmt, cache, scales, match = REFUSALS[name]
    arguments = problem(op, bfloat16, dims="deepseek_v3")
    with pytest.raises((TypeError, ValueError), match=match):
        op(**{**arguments, "cache": cache, "cache_format": fmt}, **scales)
    assert not cache.any()


@pytest.mark.parametrize("op", [*OPS, concat_insert_prefill], ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["kv_c", "k_pe"])
def test_rows_in_the_memory_of_the_cache_are_refused(op, name):
    arguments = problem(op, bfloat16, format="fp8_e4m3")
    width = arguments[name].shape[1]
    memory = np.zeros(5 * 4 * 48, np.uint8)
    inside = memory[: 3 * width * 2].view(bfloat16).reshape(3, width)
    changes = {name: inside, "cache": memory.reshape(5, 4, 48)}
    with pytest.raises(ValueError, match=f"{name}.*cache"):
        op(**{**arguments, **changes})
    assert not memory.any()
