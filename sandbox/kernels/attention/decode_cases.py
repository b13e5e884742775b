"""Problems for decode_attention: what is asked, what the arrays hold, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3, FORMATS
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.attention.prefill_cases import SCALE_FACTOR
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.lse import request_lse_shape
from sandbox.kernels.op import Cost, Tolerance

ODD_ROW = MLADims(3, 56, 43, 23, 6, 19)
"""Rows of 49 values, which no vector access fits."""
TILED = MLADims(3, 56, 256, 24, 8, 16)
"""The least interesting dims with tiles of 128."""
NO_ROPE = MLADims(5, 56, 48, 24, 0, 16)
K_SCALE, Q_DESCALE = 0.37, 0.13


def tokens_of(case: Case) -> int:
    """`S`: the most new tokens of a request; a shorter one has queries from before its start."""
    return max((*case.workload.query_lens, case.options.get("tokens", 1)))


def seq_lens_of(case: Case) -> tuple[int, ...]:
    work = case.workload
    return tuple(map(sum, zip(work.context_lens, work.query_lens)))


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """A permuted cache that is NaN wherever no query looks, and garbage table columns.

    A request of the workload with no query token is padding: length 0, block ids -1. Options:
    `block_size`; `format`; `fp8_query`; `sharp` (a factor of the queries); `causal`, `tree`,
    `window`; `topk` (entries of `indices`, of which some are holes); `sink`; `splits`,
    `deterministic`; `mass`; `out` (a dtype's name); `views` (strided queries and results, padding
    in the cache); `base`, `layout`, `no_lse`.
    """
    options, dims = case.options, case.dims
    rng = np.random.default_rng(case.seed)
    lens, tokens = seq_lens_of(case), tokens_of(case)
    requests, block_size = len(lens), options["block_size"]
    num_blocks = c.blocks_needed(lens, block_size) + 3
    table = c.block_tables(lens, block_size, num_blocks, case.seed)
    table[[n == 0 for n in lens]] = -1
    inputs: dict[str, Any] = {
        "q": _queries(case, xp),
        "block_table": c.narrowed(xp, table),
        "seq_lens": xp.asarray(np.array(lens, np.int32)),
        "softmax_scale": SCALE_FACTOR * dims.softmax_scale,
        "kv_lora_rank": dims.L,
        "causal": options.get("causal", True),
        "window": options.get("window"),
        "num_splits": options.get("splits"),
        "deterministic": options.get("deterministic", False),
        "lse_base": options.get("base", "e"),
        "lse_layout": options.get("layout", "NT"),
        "return_lse": not options.get("no_lse", False),
        "return_key_mass": options.get("mass", False),
    }
    if "fp8_query" in options:
        inputs["q_descale"] = xp.asarray(np.array([Q_DESCALE], np.float32))
    if "out" in options or "fp8_query" in options:
        inputs["out_dtype"] = arrays.DTYPES[options.get("out", case.dtype.name)]
    if options.get("tree"):
        inputs["tree_mask"] = xp.asarray(_tree(rng, requests, tokens))
    if options.get("sink"):
        inputs["sink"] = xp.asarray((2 * rng.standard_normal(dims.N)).astype(np.float32))
    wanted = _wanted(case, table, num_blocks)
    if "topk" in options:
        chosen = _indices(rng, wanted, (requests, tokens, options["topk"]))
        inputs |= {"indices": xp.asarray(chosen), "block_table": None, "seq_lens": None}
        wanted = np.isin(np.arange(wanted.size), chosen).reshape(wanted.shape)
    inputs |= _cache(case, xp, wanted)
    if options.get("views"):
        shape = (requests, tokens, dims.N, dims.L)
        dtype = inputs.get("out_dtype", case.dtype)
        out = c.unwritten(xp, (dims.N, requests, tokens, dims.L + 8), dtype)
        inputs["out"] = out.transpose(1, 2, 0, 3)[..., : dims.L]
        if inputs["return_lse"]:
            lse = request_lse_shape(shape, inputs["lse_layout"])
            wide = c.unwritten(xp, (*lse[:-1], 2 * lse[-1]), np.float32)
            inputs["out_lse"] = wide[..., ::2]
    return inputs


def _queries(case: Case, xp: Any) -> Any:
    dims, tokens = case.dims, tokens_of(case)
    requests = len(case.workload.query_lens)
    shape = (requests, tokens, dims.N, dims.E)
    values = c.normal(xp, shape, np.dtype(np.float32), case.seed)
    values *= np.float32(case.options.get("sharp", 1.0))
    if "fp8_query" in case.options:
        values = E4M3.quantize(values, np.float32(Q_DESCALE))
    else:
        values = values.astype(case.dtype)
    if case.options.get("views"):
        wide = c.unwritten(xp, (dims.N, requests, tokens, dims.E + 16), values.dtype)
        view = wide.transpose(1, 2, 0, 3)[..., : dims.E]
        view[...] = values
        return view
    return values


def _tree(rng: np.random.Generator, requests: int, tokens: int) -> np.ndarray:
    """Each new token sees itself and any others, later ones too; no other bit is of use."""
    seen = rng.random((requests, tokens, tokens)) < 0.5
    seen |= np.eye(tokens, dtype=bool)
    words = rng.integers(0, 1 << 32, (requests, tokens, -(-tokens // 32)), np.uint64)
    for token in range(tokens):
        bit = np.uint64(1 << (token % 32))
        words[..., token // 32] &= ~bit
        words[..., token // 32] |= np.where(seen[..., token], bit, np.uint64(0))
    return words.astype(np.uint32).view(np.int32)


def _wanted(case: Case, table: np.ndarray, num_blocks: int) -> np.ndarray:
    """Which rows `[blocks, block_size]` some query may see."""
    block_size, window = case.options["block_size"], case.options.get("window")
    wanted = np.zeros((num_blocks, block_size), bool)
    for row, length in zip(table, seq_lens_of(case)):
        first = 0 if window is None else max(0, length - tokens_of(case) - window + 1)
        positions = np.arange(first, length)
        wanted[row[positions // block_size], positions % block_size] = True
    return wanted


def _indices(rng: np.random.Generator, wanted: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Slots of wanted rows, one in five entries a hole; the last query of all sees holes alone."""
    slots = np.flatnonzero(wanted)
    chosen = np.full(shape, -1, np.int32)
    if slots.size:
        chosen = rng.choice(slots, shape).astype(np.int32)
        chosen[rng.random(shape) < 0.2] = -1
        if shape[0] > 1:
            chosen[-1, -1] = -1
    return chosen


def _cache(case: Case, xp: Any, wanted: np.ndarray) -> dict[str, Any]:
    """The cache and what a call says of it; rows differ in size, so that their scales do."""
    fmt, dims = case.format, case.dims
    pad = max(1, 16 // fmt.storage.itemsize) * case.options.get("views", False)
    shape = fmt.cache_shape(dims, *wanted.shape)
    cache = c.padded_pages(xp, shape, fmt.storage, pad, 2 * pad)
    count = int(wanted.sum())
    rows = c.normal(xp, (count, dims.E), np.dtype(np.float32), case.seed + 1)
    if fmt.packed:
        rows *= xp.asarray(np.linspace(0.5, 1.5, max(1, count), dtype=np.float32))[:count, None]
        rows = fmt.encode(rows, dims, **c.encode_options(fmt, K_SCALE))
    cache[xp.asarray(wanted)] = rows.astype(fmt.storage)
    said: dict[str, Any] = {"cache": cache, "cache_format": fmt.name}
    if fmt.needs_scale:
        said["k_scale"] = xp.asarray(np.array([K_SCALE], np.float32))
    return said


def cases(purpose: str) -> Iterable[Case]:
    yield from _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    yield from _small()
    yield from _packed()
    yield from _tiles()


def _small() -> Iterable[Case]:
    """Every option once, at dims that the simulator can take."""
    tiny = PRESETS["tiny"]
    fp32, fp16, bf16 = c.dtypes("float32", "float16", "bfloat16")
    ragged = Workload("ragged", (8, 0, 0, 4), (1, 1, 0, 1))
    several = Workload("several", (5, 0, 0, 9), (3, 2, 0, 3))
    for dtype in (fp32, fp16, bf16):
        options = {"block_size": 4, "views": True, "sharp": 4.0, "base": "2", "layout": "TN"}
        yield Case(tiny, "tiny", dtype, ragged, options)
        yield Case(ODD_ROW, "odd_row", dtype, several, {"block_size": 3, "layout": "BNS"})
    plain = {"block_size": 4}
    yield Case(tiny, "tiny", bf16, several, plain | {"causal": False, "splits": 3})
    yield Case(tiny, "tiny", bf16, several, plain | {"tree": True, "sink": True, "mass": True})
    yield Case(tiny, "tiny", bf16, several, plain | {"tree": True, "window": 4, "splits": 2})
    yield Case(tiny, "tiny", bf16, several, plain | {"window": 3, "mass": True, "layout": "BNS"})
    yield Case(tiny, "tiny", bf16, several, plain | {"topk": 6, "mass": True, "sink": True})
    yield Case(tiny, "tiny", fp32, several, plain | {"topk": 6, "views": True})
    yield Case(tiny, "tiny", bf16, ragged, plain | {"fp8_query": True, "out": "float32"})
    yield Case(tiny, "tiny", bf16, ragged, plain | {"no_lse": True, "mass": True})
    yield Case(tiny, "tiny", bf16, ragged, plain | {"deterministic": True, "splits": 2})
    yield Case(NO_ROPE, "no_rope", bf16, several, plain | {"sink": True})
    yield Case(tiny, "tiny", bf16, Workload("nobody", (), ()), plain | {"mass": True})
    yield Case(tiny, "tiny", bf16, Workload("padding", (0, 0), (0, 0)), plain | {"tokens": 2})


def _packed() -> Iterable[Case]:
    """Each packed format: 16- and 32-bit queries, codes, several tokens, a real model's dims."""
    fp32, fp16, bf16 = c.dtypes("float32", "float16", "bfloat16")
    several = Workload("several", (5, 0, 0, 9), (2, 1, 0, 2))
    long = Workload("long", (70, 0, 0, 133), (2, 1, 0, 2))
    for fmt in FORMATS.values():
        if not fmt.packed:
            continue
        name, dims = ("tiled", TILED) if fmt.tile_scales else ("tiny", PRESETS["tiny"])
        options = {"block_size": 4, "format": fmt.name}
        yield Case(dims, name, fp32, several, options | {"views": True})
        yield Case(dims, name, bf16, several, options | {"mass": True})
        if fmt.tile_scales or fmt.name == "fp8_e4m3":
            yield Case(dims, name, bf16, several, options | {"fp8_query": True, "topk": 5})
        if fmt.name in ("fp8_e5m2", "int8_per_token"):
            yield Case(dims, name, fp16, several, options | {"tree": True})
        v3 = replace(PRESETS["deepseek_v3"], num_heads=16)
        options = {"block_size": 64, "format": fmt.name, "splits": 2}
        yield Case(v3, "sixteen_heads_v3", bf16, long, options, "medium")


def _tiles() -> Iterable[Case]:
    """More keys than a tile has, more rows than a block has."""
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp16, bf16 = c.dtypes("float16", "bfloat16")
    ragged = Workload("1+65+0+300", (0, 64, 0, 299), (1, 1, 0, 1))
    plain = {"block_size": 16}
    for dtype in (fp16, bf16):
        yield Case(tiny, "tiny", dtype, ragged, plain | {"views": True, "mass": True}, "medium")
    for splits in (1, 2, 7):
        yield Case(tiny, "tiny", bf16, ragged, plain | {"splits": splits, "sink": True}, "medium")
    yield Case(tiny, "tiny", bf16, ragged, plain | {"deterministic": True}, "medium")
    draft = Workload("draft", (130, 0, 0, 61), (40, 3, 0, 40))
    for options in ({}, {"tree": True}, {"window": 33}, {"causal": False}):
        yield Case(tiny, "tiny", bf16, draft, plain | options, "medium")
    topk = plain | {"topk": 150, "splits": 2}
    yield Case(tiny, "tiny", bf16, Workload("topk", (250, 99), (3, 3)), topk, "medium")
    one = {"block_size": 64, "layout": "BNS"}
    yield Case(v3, "deepseek_v3", bf16, Workload("short", (70, 0), (1, 1)), one, "medium")
    heads = replace(v3, num_heads=9)
    yield Case(heads, "nine_heads_v3", fp16, ragged, one | {"splits": 3}, "medium")
    many = Workload("many", tuple(37 * i % 1500 for i in range(300)), (1,) * 300)
    yield Case(tiny, "tiny", bf16, many, {"block_size": 16}, "large")
    long = Workload("long", (5000, 0, 20000), (2, 2, 2))
    for options in ({}, {"deterministic": True}, {"mass": True, "window": 7000}):
        yield Case(heads, "nine_heads_v3", bf16, long, one | options, "large")


def _compare() -> Iterable[Case]:
    bf16, v3 = c.dtypes("bfloat16")[0], PRESETS["deepseek_v3"]
    mixed = Workload("mixed", (37, 0, 12, 5), (1,) * 4)
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(PRESETS["tiny"], "tiny", dtype, mixed, {"block_size": 16})
    plain = {"block_size": 64}
    for requests, keys in (
        (1, 40), (1, 1024), (1, 32768), (16, 1024), (128, 1024), (64, 8192), (128, 4096),
    ):  # fmt: skip
        size = "medium" if keys < 100 else "large"
        workload = Workload(f"{requests}x{keys}", (keys - 1,) * requests, (1,) * requests)
        yield Case(v3, "deepseek_v3", bf16, workload, plain, size)
    workload = Workload("64x8192", (8191,) * 64, (1,) * 64)
    for name in ("fp8_e4m3", "fp8_ds_mla", "int8_per_token"):
        yield Case(v3, "deepseek_v3", bf16, workload, plain | {"format": name}, "large")
    skewed = Workload("skewed", (65535, *range(200, 4232, 64)), (1,) * 64)
    yield Case(v3, "deepseek_v3", bf16, skewed, plain, "large")
    drafts = Workload("32x4096+3", (4093,) * 32, (3,) * 32)
    yield Case(v3, "deepseek_v3", bf16, drafts, plain, "large")
    sparse = Workload("64x8192", (8191,) * 64, (1,) * 64)
    yield Case(v3, "deepseek_v3", bf16, sparse, plain | {"topk": 2048}, "large")
    shard = replace(v3, num_heads=16)
    yield Case(shard, "sixteen_heads_v3", bf16, workload, plain, "large")
    yield Case(v3, "deepseek_v3", bf16, workload, plain | {"deterministic": True}, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The decodes of a batch over their contexts and themselves; None without any."""
    decodes = workload.decodes()
    if not decodes.query_tokens:
        return None
    return Case(dims, dims_name, dtype, decodes, {"block_size": 64}, size)


def pairs(case: Case) -> int:
    """Pairs of a query token and a key that it sees; of a tree as many as if it were causal."""
    tokens, options = tokens_of(case), case.options
    if "topk" in options:
        return len(case.workload.query_lens) * tokens * options["topk"]
    total = 0
    for length in seq_lens_of(case):
        for token in range(tokens):
            own = length - tokens + token
            end = min(length, own + 1) if options.get("causal", True) else length
            first = max(0, own - options["window"] + 1) if options.get("window") else 0
            total += max(0, end - first)
    return total


def cost(case: Case) -> Cost:
    """Each row of the cache once, queries in, results out, two products for each pair."""
    dims, options = case.dims, case.options
    rows = len(case.workload.query_lens) * tokens_of(case) * dims.N
    keys = pairs(case) if "topk" in options else sum(seq_lens_of(case))
    query = 1 if "fp8_query" in options else case.dtype.itemsize
    out = arrays.DTYPES[options.get("out", case.dtype.name)].itemsize
    return Cost(
        bytes_read=keys * case.format.row_bytes(dims) + rows * dims.E * query,
        bytes_written=rows * (dims.L * out + (0 if options.get("no_lse") else 4)),
        flops=2 * dims.N * pairs(case) * (dims.E + dims.L),
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Probabilities may be rounded to 16 bits where queries have no more, and so may restored rows
    of formats with scales in the row; all else comes of float32 sums."""
    exact = case.dtype == arrays.DTYPES["float32"]
    rounded = case.format.packed and not case.format.needs_scale and not exact
    out = 64.0
    if not exact:
        out = 2.0**15 if case.options.get("out") == "float32" else 2.0 + 4 * rounded
    return {
        "out": Tolerance(out, by_row=True),
        "out_lse": Tolerance(ulps=2.0**15 if rounded else 64),
        "key_mass": Tolerance(ulps=2.0**17 if rounded else 256),
    }
