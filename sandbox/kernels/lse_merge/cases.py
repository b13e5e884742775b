"""Problems for lse_merge: what the arrays hold, how they lie in memory, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3, Field
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.lse import by_token, lse_shape
from sandbox.kernels.op import Cost, Tolerance

ODD_HEAD = MLADims(5, 56, 18, 24, 8, 18)
"""Rows of 18 elements: 16-bit rows are only 4-byte aligned."""
FIVE_HEADS = MLADims(5, 56, 40, 24, 8, 128)
"""A number of heads that no power of two divides, in rows of a real width."""
WIDE_HEAD = MLADims(128, 7168, 512, 128, 64, 512)
"""Heads as wide as the latent, as context parallelism merges them."""

SCALE = 0.007
"""No power of two; the largest values saturate."""


def query_tokens(case: Case) -> int:
    """Tokens of the requests that have context: the others have nothing to merge."""
    lens = zip(case.workload.context_lens, case.workload.query_lens)
    return sum(query for context, query in lens if context)


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Two states; by default packed and with a key in every row.

    Options: `empty` (a quarter of each side's rows, some of both, hold NaN and inf behind an LSE
    of +inf or -inf); `nan` (NaN LSEs); `huge` (LSEs of +-1e4); `strided` (each array and output
    with strides of its own, NaN in the holes); `padded` (as many elements of padding in each row
    of prefix only); `in_place` ("prefix" or "suffix"); `no_lse`; `base`; `layout`; `scale` (of
    codes); `context` (tokens with a prefix; the others hold NaN).
    """
    options = case.options
    layout = options.get("layout", "NT")
    shape = (query_tokens(case), case.dims.N, case.dims.V)
    lses = lse_values(case, xp, 2, shape)
    states = [c.normal(xp, shape, case.dtype, case.seed + side) for side in range(2)]
    if options.get("empty"):
        for state, lse in zip(states, lses):
            spoil(xp, state, xp.isinf(lse))
    if "context" in options:
        without = slice(options["context"], None)
        spoil(xp, states[0][without], xp.ones(1, bool))
        lses[0, without] = xp.asarray([np.nan, 1e4, np.inf], np.float32)[xp.arange(shape[1]) % 3]
    lses = [xp.ascontiguousarray(by_token(lse, layout)) for lse in lses]
    inputs: dict[str, Any] = {}
    if padding := options.get("padded"):
        states[0] = wide_rows(xp, states[0], padding)
    if options.get("strided"):
        states = [wide_rows(xp, states[0], 8), heads_first(xp, states[1])]
        lses = [every_second(xp, lses[0]), transposed(xp, lses[1])]
        inputs["out"] = wide_rows(xp, c.unwritten(xp, shape, _out_dtype(case)), 16)
        inputs["out_lse"] = every_second(xp, c.unwritten(xp, lse_shape(shape, layout), np.float32))
    inputs |= dict(zip(("prefix", "suffix"), states))
    inputs |= dict(zip(("prefix_lse", "suffix_lse"), lses))
    if side := options.get("in_place"):
        inputs |= {"out": inputs[side], "out_lse": inputs[f"{side}_lse"]}
    inputs["context_tokens"] = options.get("context")
    return inputs | conventions_of(options, xp)


def _out_dtype(case: Case) -> np.dtype:
    return np.dtype(np.uint8) if "scale" in case.options else case.dtype


def conventions_of(options: Mapping[str, Any], xp: Any) -> dict[str, Any]:
    """The keywords that both merges take."""
    scale = options.get("scale")
    return {
        "return_lse": not options.get("no_lse", False),
        "lse_base": options.get("base", "e"),
        "lse_layout": options.get("layout", "NT"),
        "output_scale": None if scale is None else xp.asarray(np.array([scale], np.float32)),
    }


def lse_values(case: Case, xp: Any, states: int, shape: tuple[int, ...]) -> Any:
    """LSEs `[states, T, N]` that no exchange of tokens and heads, or of states, leaves alike."""
    tokens, heads, _ = shape
    values = 2 * c.normal(xp, (states, tokens, heads), np.dtype(np.float32), case.seed + 90)
    row = xp.arange(tokens * heads).reshape(tokens, heads)
    state = xp.arange(states)[:, None, None]
    if case.options.get("huge"):
        values += xp.asarray([1e4, -1e4], np.float32)[(row + row // 2 * state) % 2]
    if case.options.get("empty"):
        pattern = (row * (2 * state + 3) + state) % 16
        values = xp.where(pattern == 1, np.float32(np.inf), values)
        values = xp.where(pattern == 2, np.float32(-np.inf), values)
        values = xp.where(row % 16 == 5, xp.where(state % 2, -np.inf, np.inf), values)
    if case.options.get("nan"):
        values = xp.where(row % 16 == 3 + 8 * (state % 2), np.float32(np.nan), values)
    return values.astype(np.float32)


def spoil(xp: Any, state: Any, empty: Any) -> None:
    """NaN and inf in the rows `[T, N]` of a state that are empty."""
    column = xp.arange(state.shape[-1]) % 3
    garbage = xp.asarray([np.nan, np.inf, -np.inf], np.float32)[column].astype(state.dtype)
    bits = state.view(f"u{state.dtype.itemsize}")
    bits[...] = xp.where(empty[..., None], garbage.view(bits.dtype), bits)


def wide_rows(xp: Any, array: Any, pad: int) -> Any:
    """The array as the first columns of wider rows, as a padded V leaves them."""
    wide = c.unwritten(xp, (*array.shape[:-1], array.shape[-1] + pad), array.dtype)
    view = wide[..., : array.shape[-1]]
    view.view(f"u{array.dtype.itemsize}")[...] = array.view(f"u{array.dtype.itemsize}")
    return view


def heads_first(xp: Any, array: Any) -> Any:
    """The array as a transposed view of `[N, T, V]`, as a batched product leaves it."""
    return xp.ascontiguousarray(array.swapaxes(-3, -2)).swapaxes(-3, -2)


def every_second(xp: Any, lse: Any) -> Any:
    wide = xp.full((*lse.shape[:-1], 2 * lse.shape[-1]), 77.0, lse.dtype)
    wide[..., ::2].view(np.uint32)[...] = lse.view(np.uint32)
    return wide[..., ::2]


def transposed(xp: Any, lse: Any) -> Any:
    return xp.ascontiguousarray(lse.swapaxes(-1, -2)).swapaxes(-1, -2)


def tokens(count: int) -> Workload:
    """`count` query tokens of one request with context, and a request that has none."""
    return Workload(f"{count}", (64, 0), (count, 2))


def cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
    else:
        yield from _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp32, bf16 = c.dtypes("float32", "bfloat16")
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, tokens(7), {"empty": True, "strided": True})
    for dtype in (fp32, bf16):
        options = {"empty": True, "base": "2", "layout": "TN"}
        yield Case(ODD_HEAD, "odd_head", dtype, tokens(4), options)
    yield Case(tiny, "tiny", bf16, tokens(6), {"empty": True, "in_place": "prefix"})
    options = {"in_place": "suffix", "strided": True, "layout": "TN"}
    yield Case(tiny, "tiny", fp32, tokens(4), options)
    yield Case(tiny, "tiny", bf16, tokens(3), {"no_lse": True})
    yield Case(tiny, "tiny", fp32, tokens(7), {"huge": True, "base": "2"})
    yield Case(tiny, "tiny", bf16, tokens(9), {"empty": True, "nan": True})
    for count in (0, 1):
        yield Case(tiny, "tiny", bf16, tokens(count))
    yield Case(tiny, "tiny", bf16, tokens(6), {"scale": SCALE, "empty": True, "nan": True})
    options = {"scale": SCALE, "context": 2, "strided": True, "layout": "TN"}
    yield Case(ODD_HEAD, "odd_head", fp32, tokens(3), options)
    for context, side in ((0, "prefix"), (2, "prefix"), (1, "suffix")):
        options = {"context": context, "in_place": side, "empty": True, "nan": True}
        yield Case(tiny, "tiny", bf16, tokens(3), options)
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        options = {"empty": True, "huge": True, "strided": True}
        yield Case(v3, "deepseek_v3", dtype, tokens(11), options, "medium")
    yield Case(v3, "deepseek_v3", bf16, tokens(128), {"empty": True}, "medium")
    options = {"padded": 64, "scale": SCALE, "context": 9, "empty": True}
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(v3, "deepseek_v3", dtype, tokens(11), options, "medium")
    options = {"padded": 64, "context": 77, "empty": True}
    yield Case(v3, "deepseek_v3", bf16, tokens(128), options, "medium")
    yield Case(v3, "deepseek_v3", bf16, tokens(128), {"scale": SCALE, "empty": True}, "medium")
    yield Case(FIVE_HEADS, "five_heads", bf16, tokens(9), {"empty": True}, "medium")
    yield Case(WIDE_HEAD, "wide_head", bf16, tokens(5), {"empty": True, "layout": "TN"}, "medium")


def _compare() -> Iterable[Case]:
    bf16 = c.dtypes("bfloat16")[0]
    for name, count in (("tiny", 9), ("kimi_linear", 5)):
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, tokens(count), size=size)
    v3 = PRESETS["deepseek_v3"]
    for count in (1, 16, 64, 256, 1024, 8192):
        size = "medium" if count <= 64 else "large"
        yield Case(v3, "deepseek_v3", bf16, tokens(count), size=size)
    yield Case(WIDE_HEAD, "wide_head", bf16, tokens(256), size="large")
    for count in (16, 8192):
        size = "medium" if count <= 64 else "large"
        yield Case(v3, "deepseek_v3", bf16, tokens(count), {"scale": SCALE}, size)
    yield Case(v3, "deepseek_v3", bf16, tokens(8192), {"context": 4096}, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The merge of context and new tokens of a batch's prefills; None where none has context."""
    case = Case(dims, dims_name, dtype, workload.prefills(), {}, size)
    return case if query_tokens(case) else None


def cost(case: Case) -> Cost:
    """What is not empty for lack of context once in, the merged state once out."""
    tokens, width = query_tokens(case), case.dims.V
    rows, mixed = (n * case.dims.N for n in (tokens, case.options.get("context", tokens)))
    lse = 0 if case.options.get("no_lse") else 4
    return Cost(
        bytes_read=(rows + mixed) * (width * case.dtype.itemsize + 4),
        bytes_written=rows * (width * _out_dtype(case).itemsize + lse),
        flops=mixed * 3 * width,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Half an ulp for the one rounding to 16 bits, and a few float32 ulps of exp, log and sums."""
    ulps = 4 if case.dtype.itemsize == 4 else 0.51
    out = codes(case.dims.V) if "scale" in case.options else Tolerance(ulps)
    return {"out": out, "out_lse": Tolerance(ulps=4)}


def codes(width: int) -> Tolerance:
    """A value between two codes may become either."""
    return Tolerance(fields=(Field("out", 0, E4M3.dtype, width),), loose=("out",))
