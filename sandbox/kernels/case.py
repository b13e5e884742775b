"""A case: one problem for an op, and the hostile content that tests and experiments share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS, CacheFormat
from sandbox.dims import MLADims

GARBAGE_BLOCK = 2_147_480_000
"""A block id that no cache has, for the columns of a block table beyond a request's length."""


@dataclass(frozen=True)
class Workload:
    """Lengths of a batch: per request the tokens already cached and the tokens now computed."""

    name: str
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]

    @classmethod
    def of_tokens(cls, count: int) -> Workload:
        """One request of `count` new tokens, for ops that know of no context."""
        return cls(f"{count}tokens", (0,), (count,))

    @property
    def context_tokens(self) -> int:
        return sum(self.context_lens)

    @property
    def query_tokens(self) -> int:
        return sum(self.query_lens)

    def prefills(self) -> Workload:
        """The requests with more than one new token: those that attend over heads."""
        return self._where(lambda query_len: query_len > 1)

    def decodes(self) -> Workload:
        """The requests with one new token: those that attend over the latent cache."""
        return self._where(lambda query_len: query_len == 1)

    def _where(self, wanted: Callable[[int], bool]) -> Workload:
        lens = [pair for pair in zip(self.context_lens, self.query_lens) if wanted(pair[1])]
        context_lens, query_lens = zip(*lens) if lens else ((), ())
        return Workload(self.name, context_lens, query_lens)


@dataclass(frozen=True)
class Case:
    """One problem: dims, element type, lengths, and what else the op wants to know.

    `size` says who can afford it: `small` the simulator too, `medium` the host runner and NumPy,
    `large` a GPU only.
    """

    dims: MLADims
    dims_name: str
    dtype: np.dtype
    workload: Workload
    options: Mapping[str, Any] = field(default_factory=dict)
    size: str = "small"
    seed: int = 0

    @property
    def name(self) -> str:
        options = [f"{key}={value}" for key, value in self.options.items()]
        return "-".join([self.dims_name, self.dtype.name, self.workload.name, *options])

    @property
    def format(self) -> CacheFormat:
        """That of the cache: the option `format`, or the plain one of the dtype."""
        return FORMATS[self.options.get("format", self.dtype.name)]

    def in_format(self, name: str) -> Case:
        """The problem with its cache in another format; a plain one brings its dtype along."""
        fmt = FORMATS[name]
        options = {key: value for key, value in self.options.items() if key != "format"}
        if fmt.packed:
            return replace(self, options={**options, "format": name})
        return replace(self, options=options, dtype=fmt.storage)

    def affordable(self, target: str) -> bool:
        return (
            self.size
            in {
                "sim": ("small",),
                "host": ("small", "medium"),
                "cpu": ("small", "medium"),
                "gpu": ("small", "medium", "large"),
            }[target]
        )


def normal(xp: Any, shape: Sequence[int], dtype: np.dtype, seed: int) -> Any:
    """Standard normal values, rounded to `dtype`, the same on every call."""
    if xp is np:
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    else:
        values = xp.random.RandomState(seed).standard_normal(shape, dtype=np.float32)
    return values.astype(dtype)


def column_slice(xp: Any, shape: Sequence[int], dtype: np.dtype, seed: int, before: int) -> Any:
    """Normal values as the columns from `before` on of a wider array whose rest is NaN."""
    wide = xp.full((*shape[:-1], before + shape[-1] + 8), np.nan, dtype=dtype)
    view = wide[..., before : before + shape[-1]]
    view[...] = normal(xp, shape, dtype, seed)
    return view


def unwritten(xp: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of bytes 0xFF: NaN in every element type, of E4M3 codes too."""
    array = xp.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


def padded_pages(xp: Any, shape: Sequence[int], dtype: np.dtype, row_pad: int, page_pad: int):
    """A cache `[blocks, block_size, row]` whose rows and pages have padding between, all of it NaN,
    or bytes 0xFF, which make NaNs too."""
    blocks, block_size, row = shape
    page = block_size * (row + row_pad) + page_pad
    flat = xp.full((blocks * page,), 0xFF if dtype == np.uint8 else np.nan, dtype=dtype)
    strides = (page * dtype.itemsize, (row + row_pad) * dtype.itemsize, dtype.itemsize)
    return xp.lib.stride_tricks.as_strided(flat, shape, strides)


def encode_options(fmt: CacheFormat, k_scale: float) -> dict[str, Any]:
    """What `fmt.encode` is to be told: a raw tile scale is the harder one to read."""
    options: dict[str, Any] = {"k_scale": k_scale} if fmt.needs_scale else {}
    return options | ({"tile_scale": "raw"} if "raw" in fmt.tile_scales else {})


def block_tables(
    lens: Sequence[int], block_size: int, num_blocks: int, seed: int, spare_columns: int = 2
) -> np.ndarray:
    """Permuted block ids, int32 `[requests, columns]`; garbage beyond each request's blocks."""
    used = [-(-n // block_size) for n in lens]
    ids = np.random.default_rng(seed).permutation(num_blocks)
    table = np.full((len(lens), max(used, default=0) + spare_columns), GARBAGE_BLOCK, np.int32)
    start = 0
    for request, count in enumerate(used):
        table[request, :count] = ids[start : start + count]
        start += count
    return table


def narrowed(xp: Any, table: np.ndarray) -> Any:
    """The table as a view of a wider one, as a server hands it over."""
    wide = xp.full((table.shape[0], table.shape[1] + 3), GARBAGE_BLOCK, np.int32)
    wide[:, : table.shape[1]] = xp.asarray(table)
    return wide[:, : table.shape[1]]


def blocks_needed(lens: Sequence[int], block_size: int) -> int:
    return sum(-(-n // block_size) for n in lens)


def cumulative(lens: Sequence[int]) -> np.ndarray:
    """`cu_seq_lens`: int32 `[len(lens) + 1]` from 0."""
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def dtypes(*names: str) -> list[np.dtype]:
    return [arrays.DTYPES[name] for name in names]
