"""Small problems for both attentions, and the places where their variants can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from variants_here import unless

from sandbox.arrays import DTYPES, bfloat16
from sandbox.cache_formats import E4M3, FORMATS, Widths
from sandbox.dims import PRESETS
from sandbox.kernels import OPS, conformance, decode_attention, prefill_attention
from sandbox.kernels.case import block_tables, blocks_needed
from sandbox.kernels.op import Op, Variant

TINY = PRESETS["tiny"]
SCALE = 0.3
"""No width's `D ** -0.5`: a variant that has its own idea of the softmax scale shows."""
FLOAT32, FLOAT16 = DTYPES["float32"], DTYPES["float16"]
TOLERANCES = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
POISON = 77.0
NO_BLOCKS = {"block_table": None, "seq_lens": None}


@dataclass(frozen=True)
class Place:
    """A variant on one of its targets, called with NumPy arrays wherever it runs.

    `dtype` is the widest element type that it takes.
    """

    op: Op
    variant: Variant
    target: str
    dtype: np.dtype

    def __call__(self, **arguments: Any) -> Any:
        if self.target != "gpu":
            return self.op(**arguments, variant=self.variant)
        import cupy

        moved = {name: _moved(value) for name, value in arguments.items()}
        found = self.op(**moved, variant=self.variant)
        for name in self.op.returns:
            if arguments.get(name) is not None:
                arguments[name][...] = cupy.asnumpy(moved[name])
        if isinstance(found, tuple):
            return tuple(map(cupy.asnumpy, found))
        return cupy.asnumpy(found)


def _moved(value: Any) -> Any:
    """The array on the GPU, with its strides; what lies between its elements is bytes 0xFF."""
    if not isinstance(value, np.ndarray):
        return value
    import cupy

    if not value.size:
        return cupy.empty(value.shape, value.dtype)
    span = sum((n - 1) * step for n, step in zip(value.shape, value.strides))
    memory = cupy.full(span + value.dtype.itemsize, 0xFF, np.uint8).view(value.dtype)
    moved = cupy.lib.stride_tricks.as_strided(memory, value.shape, value.strides)
    once = tuple(slice(None if step else 1) for step in value.strides)
    moved[once] = cupy.asarray(np.ascontiguousarray(value[once]))
    return moved


def places(op: Op, problem: dict[str, Any], *, simulated: bool) -> Iterator[Any]:
    """Parameters: every variant on every target it has, skipped with its reason where it cannot
    run; `problem` in float32 tells what it takes. A simulated call takes a second or so."""
    for variant in op.variants.values():
        dtype = _widest(op, variant, problem)
        for target in variant.targets:
            if target == "sim" and not simulated:
                continue
            marks = unless(variant.unavailable(target))
            marks += [pytest.mark.gpu] * (target == "gpu")
            place = Place(op, variant, target, dtype)
            yield pytest.param(place, id=f"{variant.name}-{target}", marks=marks)


def _widest(op: Op, variant: Variant, problem: dict[str, Any]) -> np.dtype:
    for dtype in (FLOAT32, FLOAT16, bfloat16):
        cast = {
            name: value.astype(dtype) if getattr(value, "dtype", None) == FLOAT32 else value
            for name, value in problem.items()
        }
        bound = op.signature.bind(**cast)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        shape = (*cast["q"].shape[:-1], cast["v" if "v" in cast else "q"].shape[-1])
        arguments["out"] = np.empty(shape, dtype)[..., : cast.get("kv_lora_rank")]
        if variant.refuses(conformance.checked_arguments(op, arguments)) is None:
            return dtype
    return FLOAT32


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = FLOAT32) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def bounds(lens: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def poisoned(shape: tuple[int, ...], dtype: Any = FLOAT32) -> np.ndarray:
    """An output of NaNs, each of whose bytes is 0xFF."""
    made = np.empty(shape, dtype)
    conformance.fill_poison(made)
    return made


def close(got: np.ndarray, want: Any, dtype: Any = FLOAT32, factor: float = 1.0) -> None:
    """Equal as far as `dtype` allows for sums of a few values around 1; -inf is -inf."""
    allowed = factor * TOLERANCES[np.dtype(dtype).name]
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    np.testing.assert_allclose(got, want, rtol=allowed, atol=allowed)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit."""
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(conformance.bits_of(got), conformance.bits_of(want))


def nothing_seen(out: np.ndarray, lse: np.ndarray) -> None:
    assert not conformance.bits_of(out).any()
    assert (lse == -np.inf).all()


def attention(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of scores `[..., m]` over values `[m, V]`, and its LSE, in float64."""
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1)
    with np.errstate(divide="ignore"):
        return weights @ values / np.maximum(total, 1e-300)[..., None], top[..., 0] + np.log(total)


def prefill_reference(**arguments: Any) -> Any:
    return prefill_attention(**arguments, variant="reference")


def decode_reference(**arguments: Any) -> Any:
    return decode_attention(**arguments, variant="reference")


def prefill_problem(
    query_lens: Any, key_lens: Any, dtype: Any = FLOAT32, *, heads: int = 2, widths: Any = (32, 16),
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Requests with so many queries and keys; the rows are theirs alone."""
    rng = np.random.default_rng(seed)
    tokens, keys = sum(query_lens), sum(key_lens)
    return {
        "q": numbers(rng, (tokens, heads, widths[0]), dtype),
        "k": numbers(rng, (keys, heads, widths[0]), dtype),
        "v": numbers(rng, (keys, heads, widths[1]), dtype),
        "cu_seqlens_q": bounds(query_lens),
        "cu_seqlens_k": bounds(key_lens),
        "softmax_scale": SCALE,
    }


def in_codes(problem: dict[str, Any], descales: Any) -> dict[str, Any]:
    """The problem of E4M3 codes whose q, k and v have these descales."""
    return problem | {
        name: E4M3.quantize(problem[name], np.float32(descale))
        for name, descale in zip("qkv", descales)
    }


def paged(
    rows: list[np.ndarray], block_size: int, *, seed: int = 0, spare: int = 2
) -> dict[str, np.ndarray]:
    """The rows `[length, width]` of each request in a permuted cache that is NaN everywhere else
    (codes 0xFF), with garbage and -1 in columns that no request needs."""
    lens = [len(each) for each in rows]
    num_blocks = blocks_needed(lens, block_size) + 2
    table = block_tables(lens, block_size, num_blocks, seed, spare)
    table[:, -1:] = -1 if spare else table[:, -1:]
    cache = poisoned((num_blocks, block_size, rows[0].shape[1]), rows[0].dtype)
    for own, ids in zip(rows, table):
        places = np.arange(len(own))
        cache[ids[places // block_size], places % block_size] = own
    return {"cache": cache, "block_table": table, "seq_lens": ints(*lens)}


def decode_problem(
    lens: Any, dtype: Any = FLOAT32, *, tokens: int = 1, heads: int = TINY.N, widths: Any = TINY,
    block_size: int = 4, seed: int = 0, spare: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """Requests of so many keys with `tokens` queries each over a cache as `paged` has it."""
    rng = np.random.default_rng(seed)
    width = widths.L + widths.R
    rows = [numbers(rng, (length, width), dtype) for length in lens]
    return {
        "q": numbers(rng, (len(lens), tokens, heads, width), dtype),
        **paged(rows, block_size, seed=seed, spare=spare),
        "softmax_scale": SCALE,
        "kv_lora_rank": widths.L,
    }


def slots_of(problem: dict[str, Any], request: int) -> np.ndarray:
    """Slots of a request's keys by position."""
    block_size = problem["cache"].shape[1]
    positions = np.arange(int(problem["seq_lens"][request]))
    blocks = problem["block_table"][request, positions // block_size]
    return blocks * block_size + positions % block_size


def rows_of(problem: dict[str, Any], request: int) -> np.ndarray:
    """Rows of a request by position, in the cache's dtype."""
    cache = problem["cache"]
    slots = slots_of(problem, request)
    return cache[slots // cache.shape[1], slots % cache.shape[1]]


def only(problem: dict[str, Any], requests: Any) -> dict[str, Any]:
    """The problem of some of the requests, in that order, over the same cache."""
    chosen = list(requests)
    parts = {name: problem[name][chosen] for name in ("q", "block_table", "seq_lens")}
    return problem | parts


def with_indices(problem: dict[str, Any], indices: Any) -> dict[str, Any]:
    return problem | NO_BLOCKS | {"indices": np.ascontiguousarray(indices, dtype=np.int32)}


def decode_expected(
    problem: dict[str, Any], sees: Callable[[int, int, int], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Results and LSEs `[N, B * S]` where query `i` of request `b` sees position `j` if
    `sees(b, i, j)`, in float64."""
    requests, tokens, heads, _ = problem["q"].shape
    rank = problem["kv_lora_rank"]
    out = np.zeros((requests, tokens, heads, rank))
    lse = np.full((heads, requests, tokens), -np.inf)
    for b in range(requests):
        rows = rows_of(problem, b).astype(np.float64)
        for i in range(tokens):
            seen = rows[[sees(b, i, j) for j in range(len(rows))]] if len(rows) else rows
            if len(seen):
                scores = problem["softmax_scale"] * problem["q"][b, i].astype(np.float64) @ seen.T
                out[b, i], lse[:, b, i] = attention(scores, seen[:, :rank])
    return out, lse.reshape(heads, -1)


def absorbed_and_not(
    lens: Any, tokens: int, dtype: Any = FLOAT32, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
    """One layer's attention twice: `decode_attention` over the latent, `prefill_attention` over the
    heads that it is projected up to, and `W_UV` `[N, L, V]`, which the first one's results are to
    be multiplied by."""
    rng = np.random.default_rng(seed)
    N, L, P, R, V = TINY.N, TINY.L, TINY.P, TINY.R, TINY.V
    w_uk = rng.standard_normal((N, P, L)) / L**0.5
    w_uv = rng.standard_normal((N, L, V)) / L**0.5
    q = rng.standard_normal((len(lens), tokens, N, P + R))
    latents = [rng.standard_normal((length, L + R)) for length in lens]
    ql_nope = np.einsum("bsnp,npl->bsnl", q[..., :P], w_uk)
    decode = {
        "q": np.concatenate([ql_nope, q[..., P:]], axis=-1).astype(dtype),
        **paged([each.astype(dtype) for each in latents], 4, seed=seed),
        "softmax_scale": SCALE,
        "kv_lora_rank": L,
    }
    flat = np.concatenate(latents)
    nope = np.einsum("tl,npl->tnp", flat[:, :L], w_uk)
    rope = np.broadcast_to(flat[:, None, L:], (len(flat), N, R))
    prefill = {
        "q": q.reshape(-1, N, P + R).astype(dtype),
        "k": np.concatenate([nope, rope], axis=-1).astype(dtype),
        "v": np.einsum("tl,nlv->tnv", flat[:, :L], w_uv).astype(dtype),
        "cu_seqlens_q": bounds([tokens] * len(lens)),
        "cu_seqlens_k": bounds(lens),
        "softmax_scale": SCALE,
    }
    return prefill, decode, w_uv


def tree_words(seen: np.ndarray) -> np.ndarray:
    """`tree_mask` for who sees which new token, bool `[B, S, S]`."""
    requests, tokens, _ = seen.shape
    words = np.zeros((requests, tokens, -(-tokens // 32)), np.uint32)
    for token in range(tokens):
        words[..., token // 32] |= seen[..., token].astype(np.uint32) << np.uint32(token % 32)
    return words.view(np.int32)


def packed_rows(
    name: str, values: np.ndarray, widths: Widths, k_scale: float
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Float32 values as rows of a format, what these decode to, and what a call says of them."""
    fmt = FORMATS[name]
    scale = {"k_scale": k_scale} if fmt.needs_scale else {}
    rows = fmt.encode(values, widths, **scale)
    decoded = fmt.decode(rows, widths, **scale).astype(np.float32)
    return rows, decoded, {"cache_format": name, **scale}


def _parameters(op: Op, problem: dict[str, Any]) -> tuple[Any, Any, Any]:
    everywhere, fast = ([*places(op, problem, simulated=simulated)] for simulated in (True, False))
    host = [each for each in fast if each.values[0].target == "host"]
    return tuple(pytest.mark.parametrize("attend", each) for each in (everywhere, fast, host))


prefill, fast_prefill, _ = _parameters(OPS["prefill_attention"], prefill_problem([2], [3]))
decode, fast_decode, host_decode = _parameters(OPS["decode_attention"], decode_problem([3]))
"""Where variants are called: everywhere, not in the simulator, on the host runner alone."""
