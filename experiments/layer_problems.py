"""Problems of a whole layer: shapes as data, and the arrays, cache and plan of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS, CacheFormat, choose_k_scale
from sandbox.dims import MLADims
from sandbox.kernels import concat_insert
from sandbox.kernels.case import Workload, block_tables, blocks_needed, normal, unwritten
from sandbox.layers import DecodeSteps, Rope, Step, prepare
from sandbox.planner import plan_step, slot_mapping

YARN = {
    "factor": 40.0,
    "original_max_positions": 4096,
    "theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""DeepSeek-V3's RoPE, which every preset gets that rotates."""
LARGEST_VALUE = 6.0
"""Normal values hardly go beyond it: `k_scale` leaves room for those that are not seen yet."""
SPARE_BLOCKS = 2

# What is run without --prefill, --decode and --format, by whether there is a GPU.
PREFILLS = {True: "2048+0,2048+32768,8192+0,8192+32768", False: "5+0,5+9"}
DECODES = {True: "1x4096,1x32768,32x4096,32x32768,128x4096,128x32768", False: "2x6"}
QUICK_PREFILLS = {True: "2048+8192", False: "5+9"}
QUICK_DECODES = {True: "32x4096", False: "2x6"}
PACKED_FORMATS = "fp8_e4m3,fp8_ds_mla"
"""Beside the plain one of the dtype."""
BLOCK_SIZES = {True: 64, False: 4}
WORKSPACES = {True: 16384, False: 8}
"""Rows of context that are gathered at once, so that long contexts come in chunks."""

SWAPS = (
    "gather=raw_warp",
    "gather=torch",
    "concat_context=torch",
    "lse_merge=raw_tile",
    "lse_merge=torch",
    "prefill_attention=torch_varlen",
    "prefill_attention=torch_sdpa",
    "concat_insert_prefill=raw_unfused",
    "decode_attention=torch",
    "concat_insert_decode=raw_unfused",
    "rms_norm=torch",
    "linear=blas",
)
"""Variants that a layer is run with in the place of its own choice, one at a time."""
SWAPPED = ("prefill_2048+0", "prefill_2048+32768", "decode_1x4096", "decode_32x4096")
"""Shapes with swaps, beside all that run without a GPU; with the plain cache alone."""


@dataclass(frozen=True)
class Shape:
    """`requests` requests that each compute `tokens` new tokens after `context` cached ones."""

    phase: str
    requests: int
    tokens: int
    context: int

    @property
    def name(self) -> str:
        if self.phase == "prefill":
            return f"prefill_{self.tokens}+{self.context}"
        return f"decode_{self.requests}x{self.context}"

    @property
    def new_tokens(self) -> int:
        return self.requests * self.tokens

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        seen = self.tokens * self.context + self.tokens * (self.tokens + 1) // 2
        return self.requests * seen


def prefills(text: str) -> list[Shape]:
    """Shapes of `2048+32768`: new tokens and cached ones of a request; several with commas.

    Raises:
        ValueError: another form, or fewer than 2 new tokens.
    """
    shapes = [Shape("prefill", 1, *pair) for pair in _pairs(text, "+")]
    for shape in shapes:
        if shape.tokens < 2:
            raise ValueError(f"{shape.tokens} new tokens: a prefill has at least 2")
    return shapes


def decodes(text: str) -> list[Shape]:
    """Shapes of `32x4096`: requests with one new token each, and their cached ones.

    Raises:
        ValueError: another form, or no request.
    """
    shapes = [Shape("decode", requests, 1, context) for requests, context in _pairs(text, "x")]
    if any(not shape.requests for shape in shapes):
        raise ValueError("0 requests, expected at least 1")
    return shapes


def _pairs(text: str, sign: str) -> list[tuple[int, int]]:
    if text.strip() in ("", "none"):
        return []
    found = []
    for part in text.split(","):
        left, _, right = part.strip().partition(sign)
        if not (left.isdigit() and right.isdigit()):
            raise ValueError(f"{part.strip()!r}, expected two numbers, as 32{sign}4096, or none")
        found.append((int(left), int(right)))
    return found


@dataclass(frozen=True)
class Problem:
    """One step of one layer; `dims` are those of the rank.

    Attributes:
        cache_format: a name in `FORMATS`.
        gate: whether the layer has an output gate.
        workspace_rows: rows of context that are gathered at once.
    """

    shape: Shape
    dims: MLADims
    dims_name: str
    dtype: str
    cache_format: str
    gate: bool = False
    block_size: int = 64
    workspace_rows: int = 16384
    seed: int = 0

    @property
    def name(self) -> str:
        gate = "-gate" if self.gate else ""
        return f"{self.dims_name}-{self.dtype}-{self.shape.name}-{self.cache_format}{gate}"

    @property
    def format(self) -> CacheFormat:
        return FORMATS[self.cache_format]

    @property
    def plain(self) -> bool:
        """Whether the cache holds numbers of the layer's own dtype."""
        return self.cache_format == self.dtype

    @property
    def rotates(self) -> bool:
        return self.dims.rope and self.dims.R > 0

    @property
    def workload(self) -> Workload:
        requests = self.shape.requests
        contexts, queries = (self.shape.context,) * requests, (self.shape.tokens,) * requests
        return Workload(self.shape.name, contexts, queries)

    def ops(self) -> tuple[str, ...]:
        """Names of the ops that the step runs."""
        always = ("linear", "rms_norm", *(("sigmoid_gate",) if self.gate else ()))
        if self.shape.phase == "decode":
            return (*always, "concat_insert_decode", "decode_attention")
        context = ("gather", "concat_context", "lse_merge") if self.shape.context else ()
        return (*always, "concat_insert_prefill", "prefill_attention", *context)


@dataclass
class Inputs:
    """What all contenders of a problem are given, as arrays of `xp`.

    Attributes:
        weights: by Hugging Face's names.
        hidden: `[T, H]`.
        positions: int64 `[T]` of NumPy.
        cache: the contexts are in it; every other byte is 0xFF.
        table: int32 block table of NumPy; columns past a request's blocks hold ids of no block.
        slots: int64 `[T]` of NumPy, where the new tokens' rows belong.
    """

    problem: Problem
    xp: Any
    weights: Mapping[str, Any]
    rope: Rope | None
    hidden: Any
    positions: np.ndarray
    cache: Any
    table: np.ndarray
    slots: np.ndarray
    k_scale: float | None
    steps: DecodeSteps | None = field(default=None, repr=False)

    @property
    def softmax_scale(self) -> float:
        return self.problem.dims.softmax_scale * (self.rope.softmax_factor if self.rope else 1.0)

    def step(self) -> Step:
        """The plan of the step on the arrays' device; a decode's is at fixed addresses."""
        problem, shape = self.problem, self.problem.shape
        contexts = np.full(shape.requests, shape.context, np.int64)
        if shape.phase == "prefill":
            rows = problem.workspace_rows
            plan = plan_step([shape.tokens], contexts, self.table, problem.block_size, rows)
            return prepare(plan, like=self.hidden)
        if self.steps is None:
            self.steps = DecodeSteps(
                shape.requests,
                columns=self.table.shape[1],
                block_size=problem.block_size,
                num_blocks=len(self.cache),
                like=self.hidden,
            )
        return self.steps.update(contexts, self.table)

    def context(self, request: int) -> Any:
        """float32 `[context, E]`: what the cache restores to, by no kernel's word.

        Each is one product of a code and its scale; a reader with 16 bits rounds once more.
        """
        problem = self.problem
        positions = np.arange(problem.shape.context)
        blocks, offsets = np.divmod(positions, problem.block_size)
        rows = self.cache[
            self.xp.asarray(self.table[request, blocks]), self.xp.asarray(offsets)
        ]  # fmt: skip
        return problem.format.decode(rows, problem.dims, k_scale=self.k_scale)

    def new_rows(self) -> Any:
        """The stored rows `[T, row]` of the new tokens."""
        return self._rows()[self.xp.asarray(self.slots)]

    def forget_new_rows(self) -> None:
        """Every byte of the new tokens' rows is 0xFF again."""
        shape = (len(self.slots), self.cache.shape[2])
        blank = unwritten(self.xp, shape, self.cache.dtype)
        self._rows()[self.xp.asarray(self.slots)] = blank

    def _rows(self) -> Any:
        return self.cache.reshape(-1, self.cache.shape[2])


def make_inputs(problem: Problem, weights: Mapping[str, Any], xp: Any) -> Inputs:
    """Random hidden states and contexts, the latter written to the cache by `concat_insert`."""
    shape, dims, fmt = problem.shape, problem.dims, problem.format
    dtype = arrays.DTYPES[problem.dtype]
    lens = [shape.context + shape.tokens] * shape.requests
    blocks = blocks_needed(lens, problem.block_size) + SPARE_BLOCKS
    table = block_tables(lens, problem.block_size, blocks, problem.seed)
    cache = unwritten(xp, fmt.cache_shape(dims, blocks, problem.block_size), fmt.storage)
    positions = np.tile(np.arange(shape.context, lens[0]), shape.requests)
    requests = np.repeat(np.arange(shape.requests), shape.tokens)
    inputs = Inputs(
        problem=problem,
        xp=xp,
        weights=weights,
        rope=Rope.yarn(dims.R, max_positions=lens[0], **YARN) if problem.rotates else None,
        hidden=normal(xp, (shape.new_tokens, dims.H), dtype, problem.seed + 1),
        positions=positions,
        cache=cache,
        table=table,
        slots=slot_mapping(table, requests, positions, problem.block_size),
        k_scale=None,
    )
    for request in range(shape.requests):
        _fill(inputs, request)
    return inputs


def _fill(inputs: Inputs, request: int) -> None:
    """Write a request's context; the first one's latents also set `k_scale`."""
    problem, xp, fmt = inputs.problem, inputs.xp, inputs.problem.format
    dims, context = problem.dims, problem.shape.context
    dtype, seed = arrays.DTYPES[problem.dtype], problem.seed + 2 + request
    rows = normal(xp, (context, dims.E), dtype, seed)
    kv_c, k_pe = rows[:, : dims.L], rows[:, dims.L :] if dims.R else None
    if fmt.needs_scale and inputs.k_scale is None:
        keys = rows[:, dims.L :]
        inputs.k_scale = choose_k_scale(kv_c, keys, fmt.name, amax=LARGEST_VALUE)
    positions = np.arange(context)
    requests = np.full(context, request)
    slots = slot_mapping(inputs.table, requests, positions, problem.block_size)
    concat_insert(
        kv_c, k_pe, inputs.cache, xp.asarray(slots),
        cache_format=fmt.name, k_scale=inputs.k_scale,
    )  # fmt: skip
