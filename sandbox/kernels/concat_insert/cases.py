"""Problems for the inserts: what is asked, and what the arrays hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload

ODD = MLADims(3, 56, 43, 24, 6, 16)
"""Rows of 49 elements, three pairs from element 43 on: 16-bit pairs are only 2-byte aligned."""
MANY_HEADS = replace(ODD, num_heads=90)
"""More heads than threads over pairs, and a number of pairs that does not divide the threads."""
ODD_CODES = MLADims(3, 56, 42, 24, 6, 16)
"""Widths of packed rows that no vector of 8 values divides."""
TILED = MLADims(3, 56, 256, 24, 8, 16)
"""Two tiles of 128, for the format that has them."""
NO_ROPE_COLUMNS = MLADims(3, 56, 40, 24, 0, 16)
NOT_ROTATED = replace(PRESETS["tiny"], rope=False)

K_SCALE, Q_DESCALE, K_DESCALE, V_DESCALE = 0.37, 0.021, 0.3, 0.0125
"""None a power of two; the query's and the value's saturate some codes."""

MIXED = Workload("mixed", (5, 0, 17), (3, 1, 3))
NOBODY = Workload("nobody", (), ())
ONE = Workload("one", (9,), (1,))
MANY = Workload("many", (0, 70, 3), (600, 1, 40))


def positions_of(workload: Workload) -> np.ndarray:
    """int64 position of every new token in its request."""
    spans = zip(workload.context_lens, workload.query_lens)
    return np.concatenate([np.zeros(0), *[s + np.arange(n) for s, n in spans]]).astype(np.int64)


def slots_of(case: Case) -> tuple[np.ndarray, int]:
    """Permuted slots, some -1 with the option `skipped`, and the blocks that hold them."""
    tokens, block_size = case.workload.query_tokens, case.options["block_size"]
    num_blocks = -(-tokens // block_size) + 2
    rng = np.random.default_rng(case.seed)
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
    if case.options.get("skipped"):
        slots[rng.random(tokens) < 0.3] = -1
    return slots, num_blocks


def rope_table(rows: int, width: int) -> np.ndarray:
    """float32 `[rows, width]`: cosines, then sines, of position * 10000^(-2i / width)."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / max(width, 1))
    angles = np.arange(rows)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class Maker:
    """Arrays of a case. With the option `views` inputs are columns of wider NaN-filled arrays, with
    two rows more than there are tokens, as a padded graph hands them over."""

    def __init__(self, case: Case, xp: Any) -> None:
        self.case, self.xp = case, xp
        self.views = case.options.get("views", True)
        self.rows = case.workload.query_tokens + 2 * self.views
        self.offset = 1 if case.dims.L % 2 else 16  # elements before a view: odd dims, odd address

    def values(self, *shape: int, seed: int) -> Any:
        seed += 100 * self.case.seed
        if self.views:
            return c.column_slice(self.xp, shape, self.case.dtype, seed, self.offset)
        return c.normal(self.xp, shape, self.case.dtype, seed)

    def latent_and_key(self) -> dict[str, Any]:
        """kv_c as a norm leaves it, or a slice beside k_pe; k_pe a slice of its projection."""
        dims, rows = self.case.dims, self.rows
        both = self.values(rows, dims.E, seed=1)
        kv_c = both[:, : dims.L] if self.views else self.values(rows, dims.L, seed=2)
        k_pe = both[:, dims.L :] if dims.R else None
        if self.case.format.packed and self.case.size == "small":
            self._make_hostile(kv_c, k_pe)
        return {"kv_c": kv_c, "k_pe": k_pe}

    def _make_hostile(self, kv_c: Any, k_pe: Any) -> None:
        """Values at the edges of the codes: zeros, ties, subnormals, too large, inf and NaN."""
        count = min(len(EDGES), kv_c.shape[1])
        with np.errstate(over="ignore"):
            edges = np.asarray(EDGES[:count], np.float32) * np.float32(K_SCALE)
            edges = self.xp.asarray(edges.astype(kv_c.dtype))
        for row in range(0, len(kv_c), 5):
            kv_c[row] = 0
        for row in range(1, len(kv_c), 5):
            kv_c[row, :count] = edges
        for row in range(2, len(kv_c), 5):
            kv_c[row, kv_c.shape[1] // 2 :] = (np.nan, np.inf, -np.inf)[row // 5 % 3]
        for row in range(3, len(kv_c) * (k_pe is not None), 5):
            k_pe[row] = (0, 1000, np.nan, -np.inf)[row // 5 % 4]

    def cache_and_slots(self) -> dict[str, Any]:
        fmt = self.case.format
        slots, num_blocks = slots_of(self.case)
        shape = fmt.cache_shape(self.case.dims, num_blocks, self.case.options["block_size"])
        pad = max(1, 16 // fmt.storage.itemsize) * self.views
        cache = c.padded_pages(self.xp, shape, fmt.storage, pad, 2 * pad)
        arguments = {"cache": cache, "slot_mapping": self.xp.asarray(slots)}
        if fmt.packed:
            arguments["cache_format"] = fmt.name
        if fmt.needs_scale:
            arguments["k_scale"] = self.scale(K_SCALE)
        if "tile_scale" in self.case.options:
            arguments["tile_scale"] = self.case.options["tile_scale"]
        return arguments

    def scale(self, value: float) -> Any:
        return self.xp.asarray(np.array([value], np.float32))

    def rotation(self) -> dict[str, Any]:
        dims, positions = self.case.dims, positions_of(self.case.workload)
        if not dims.rope or not dims.R:
            return {}
        table = rope_table(int(positions.max(initial=0)) + 3, dims.R)
        return {"positions": self.xp.asarray(positions), "cos_sin": self.xp.asarray(table)}


EDGES = (448, 449, 464, 465, 480, 1000, -464, -465, 57344, 65000, 1e30, -1e30, 0.0, -0.0)
EDGES += (2**-9, 2**-10, 1.5 * 2**-9, -(2**-10), 2**-16, 2**-17, 1.5 * 2**-16, 2**-30, np.inf)
EDGES += (-np.inf, np.nan, -np.nan, 1.0625, 1.1875, 17, 19, 1e-38, 1e-40)
"""Around the largest numbers, the subnormals and the ties of E4M3 and E5M2."""


def insert_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options: `block_size`; `skipped` (30% negative slots); `views` (default); `format` of a
    packed cache; `tile_scale`."""
    maker = Maker(case, xp)
    return {**maker.latent_and_key(), **maker.cache_and_slots()}


def prefill_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `insert_inputs`, and `in_place` (q_out is q)."""
    inputs = _heads_of_prefill(Maker(case, xp))
    del inputs["v"]
    return {**inputs, "q_out": inputs["q"] if case.options.get("in_place") else None}


def prefill_fp8_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `insert_inputs`."""
    maker = Maker(case, xp)
    scales = {"q_descale": Q_DESCALE, "k_descale": K_DESCALE, "v_descale": V_DESCALE}
    scales = {name: maker.scale(value) for name, value in scales.items()}
    return {**_heads_of_prefill(maker), **scales}


def _heads_of_prefill(maker: Maker) -> dict[str, Any]:
    dims = maker.case.dims
    q = maker.values(maker.rows, dims.N, dims.P + dims.R, seed=3)
    projected = maker.values(maker.rows, dims.N, dims.P + dims.V, seed=4)
    return {
        "q": q,
        "k_nope": projected[..., : dims.P],
        "v": projected[..., dims.P :],
        **maker.latent_and_key(),
        **maker.cache_and_slots(),
        **maker.rotation(),
    }


def decode_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `insert_inputs`, and `fp8_query`; ql_nope is always a transposed product
    `[N, T, L]`."""
    maker, dims = Maker(case, xp), case.dims
    q = maker.values(maker.rows, dims.N, dims.P + dims.R, seed=5)
    return {
        "ql_nope": maker.values(dims.N, maker.rows, dims.L, seed=6).swapaxes(0, 1),
        "q_pe": q[..., dims.P :] if dims.R else None,
        **maker.latent_and_key(),
        **maker.cache_and_slots(),
        **maker.rotation(),
        "q_descale": maker.scale(Q_DESCALE) if case.options.get("fp8_query") else None,
    }


def _decode_step(workload: Workload) -> Workload:
    """One new token a request."""
    return replace(workload, query_lens=(1,) * len(workload.query_lens))


def insert_cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
        yield from _packed_conformance()
        tiles = {"block_size": 4, "format": "fp8_ds_mla", "tile_scale": "raw"}
        yield Case(TILED, "tiled", c.dtypes("bfloat16")[0], MIXED, tiles)
    else:
        yield from _compare()
        yield from _small_packed()
        for fmt in PACKED:
            yield from _deepseek(16, 128, 8192, format=fmt)


def prefill_cases(purpose: str) -> Iterable[Case]:
    if purpose != "conformance":
        yield from (_with(case, in_place=True) for case in _compare())
        yield from (case for case in _compare() if case.size == "large")
        yield from _small_packed()
        for fmt in PACKED:
            yield from _deepseek(16, 8192, format=fmt, in_place=True)
        return
    yield from _conformance()
    yield from _packed_conformance()
    bf16 = c.dtypes("bfloat16")[0]
    for name, dims in (("tiny", PRESETS["tiny"]), ("not_rotated", NOT_ROTATED), ("odd", ODD)):
        yield Case(dims, name, bf16, MIXED, {"block_size": 4, "in_place": True, "skipped": True})
    options = {"block_size": 16, "in_place": True}
    yield Case(MANY_HEADS, "many_heads", bf16, MANY, options, "medium")


def prefill_fp8_cases(purpose: str) -> Iterable[Case]:
    if purpose != "conformance":
        yield from (case for case in _compare() if case.size == "small")
        yield from _small_packed()
        for fmt in ("fp8_e4m3", "fp8_ds_mla", None):
            yield from _deepseek(16, 1024, 8192, format=fmt)
        return
    yield from _conformance()
    yield from _packed_conformance()
    options = {"block_size": 16, "format": "fp8_e4m3"}
    yield Case(MANY_HEADS, "many_heads", c.dtypes("bfloat16")[0], MANY, options, "medium")


def decode_cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
        yield from _packed_conformance()
        packed = (case for case in _packed_conformance() if case.dtype == c.dtypes("bfloat16")[0])
        for case in (*packed, *_conformance()):
            yield _with(case, fp8_query=True)
        return
    cases = [*_compare(), *_small_packed(), *_deepseek(128, 512)]
    for fmt in PACKED:
        cases += _deepseek(1, 16, 128, format=fmt)
    for fmt in ("fp8_e4m3", "fp8_ds_mla"):
        cases += _deepseek(1, 16, 128, format=fmt, fp8_query=True)
    for case in cases:
        if case.workload.query_tokens <= 512:
            yield replace(case, workload=_decode_step(case.workload))


PACKED = tuple(fmt.name for fmt in FORMATS.values() if fmt.packed)


def _packed_conformance() -> Iterable[Case]:
    """Every packed format: each input dtype, no rotation, odd widths, nobody, a real model's."""
    bf16 = c.dtypes("bfloat16")[0]
    short = Workload("short", (130, 0), (4, 1))
    for name in PACKED:
        dims_name, dims = _small_dims(name)
        options = {"block_size": 4, "format": name, "skipped": True}
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            yield Case(dims, dims_name, dtype, MIXED, options)
        plain = replace(dims, rope=False)
        yield Case(plain, f"{dims_name}_not_rotated", bf16, MIXED, options)
        if dims is not TILED:
            yield Case(ODD_CODES, "odd_codes", bf16, MIXED, {**options, "block_size": 3})
        yield Case(dims, dims_name, bf16, NOBODY, options)
        options = {"block_size": 64, "format": name, "skipped": True}
        yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, short, options, "medium")


def _with(case: Case, **options: Any) -> Case:
    return replace(case, options={**case.options, **options})


def _conformance() -> Iterable[Case]:
    tiny, bf16 = PRESETS["tiny"], c.dtypes("bfloat16")[0]
    options = {"block_size": 4, "skipped": True}
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, MIXED, options)
    for dtype in c.dtypes("float32", "bfloat16"):
        yield Case(ODD, "odd", dtype, MIXED, {"block_size": 3})
    yield Case(NO_ROPE_COLUMNS, "no_rope_columns", bf16, MIXED, options)
    yield Case(NOT_ROTATED, "not_rotated", bf16, MIXED, options)
    yield Case(tiny, "tiny", bf16, NOBODY, options)
    yield Case(tiny, "tiny", bf16, ONE, {"block_size": 1})
    yield Case(tiny, "tiny", bf16, MANY, {"block_size": 16, "skipped": True}, "medium")
    short = Workload("short", (130, 0), (4, 1))
    options = {"block_size": 64, "skipped": True}
    yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, short, options, "medium")


def _compare() -> Iterable[Case]:
    for name in ("tiny", "kimi_linear"):
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, MIXED, {"block_size": 16, "views": False}, size)
    yield from _deepseek(1, 16, 64, 1024, 8192)


def _small_packed() -> Iterable[Case]:
    bf16 = c.dtypes("bfloat16")[0]
    for name in PACKED:
        dims_name, dims = _small_dims(name)
        options = {"block_size": 16, "views": False, "format": name}
        yield Case(dims, dims_name, bf16, MIXED, options)


def _small_dims(format_name: str) -> tuple[str, MLADims]:
    return ("tiled", TILED) if FORMATS[format_name].tile_scales else ("tiny", PRESETS["tiny"])


def _deepseek(*token_counts: int, **options: Any) -> Iterable[Case]:
    options = {key: value for key, value in options.items() if value is not None}
    options = {"block_size": 64, "views": False, **options}
    bf16 = c.dtypes("bfloat16")[0]
    for tokens in token_counts:
        requests = -(-tokens // 1024) if tokens > 512 else tokens
        each = tokens // requests
        workload = Workload(f"{tokens}tokens", (100,) * requests, (each,) * requests)
        size = "medium" if tokens <= 64 else "large"
        yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, workload, options, size)


def insert_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """All new tokens of a batch, or None where there are none."""
    if not workload.query_tokens:
        return None
    options = {"block_size": 64, "views": False}
    return Case(dims, dims_name, dtype, workload, options, size)


def prefill_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's prefills, or None where there are none."""
    return insert_workload(dims, dims_name, dtype, workload.prefills(), size)


def prefill_fp8_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's prefills beside an fp8 cache, or None where there are none."""
    case = prefill_workload(dims, dims_name, dtype, workload, size)
    return None if case is None else _with(case, format="fp8_e4m3")


def decode_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's decodes, or None where there are none."""
    return insert_workload(dims, dims_name, dtype, workload.decodes(), size)
