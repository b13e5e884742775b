from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS
from sandbox.cache_formats.ds_mla import TILE
from sandbox.kernels.attention import decode_attention
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.attention.key_mass import write_key_mass
from sandbox.kernels.attention.launch import (
    from_natural,
    key_arguments,
    latent_macros,
    request_lse,
    strides,
)
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.cuda.device import device_info, shared_per_block
from sandbox.kernels.scratch import scratch

ATTEND = CudaKernel(Path(__file__).with_suffix(".cu"), "decode_mma", min_cc=(8, 0), overlap=True)
MERGE = CudaKernel(Path(__file__).with_name("raw_decode_merge.cu"), "decode_merge", overlap=True)
PIECE_TOKENS = 1024
"""Keys that a deterministic call sums up at a time: part of what its results are."""
OVERHEAD = 4
"""Tiles of keys that take as long as loading a sequence's queries and writing its results."""
MERGE_THREADS = 128
FEW_ROWS = 2048
"""Up to so many are merged by a block each, more by a warp each."""
MERGE_TEAMS = 4
"""Of such a block; one where results must not depend on how many rows there are."""
HOST_SMS = 4
"""On the host shares are as many as if there were so many SMs, whatever its cores."""
RESULT_REGISTERS = 128
"""Of a thread, for sums of weighted values."""


@dataclass(frozen=True)
class Shape:
    """How a block cuts its work: query rows, keys of a tile, warps, teams of warps with rows of
    their own, and in how many ways a team's warps share out scores by rows, and by columns whose
    sums are then added up."""

    rows: int
    tokens: int
    warps: int
    teams: int
    qk_m: int
    qk_k: int

    @property
    def groups(self) -> int:
        """Warps that share a row's scores."""
        return self.warps // self.teams // self.qk_m

    def shared_bytes(self, width: int, raw_bytes: int) -> int:
        """Shared memory of a block; `raw_bytes` of a packed row, or 0. As the kernel adds it up."""
        keys = self.tokens * _tile_row_bytes(width)
        total = -(-self.rows * _tile_row_bytes(width) // 128) * 128
        total += keys if raw_bytes else 2 * keys
        total = -(-(total + self.tokens * -(-raw_bytes // 16) * 16) // 128) * 128
        total += self.rows * _tile_row_bytes(self.tokens)
        return total + 4 * (self.groups + 1) * self.rows + 12 * self.tokens + 4 * (self.warps + 15)

    def result_registers(self, latent: int) -> int:
        units = -(-latent // 16)
        return self.rows // self.teams // 16 * -(-units // (self.warps // self.teams)) * 8


SHAPES = (
    Shape(64, 64, 8, 2, 1, 2),
    Shape(64, 32, 8, 2, 1, 2),
    Shape(32, 64, 8, 1, 1, 2),
    Shape(32, 32, 8, 1, 2, 2),
    Shape(16, 64, 8, 1, 1, 2),
    Shape(16, 32, 4, 1, 1, 2),
    Shape(16, 16, 2, 1, 1, 2),
)
"""Those preferred first; narrower ones are for fewer rows or less shared memory."""


def _tile_row_bytes(columns: int) -> int:
    pieces = 2 * -(-columns // 16)
    return 16 * (pieces if pieces % 8 == 0 else pieces | 1)


def row_count(q: Any, indices: Any) -> int:
    """Rows of a sequence: heads of all tokens, or of one where each names its own keys."""
    _, tokens, heads, _ = q.shape
    return heads if indices is not None else tokens * heads


def shape_for(q: Any, cache: Any, indices: Any, kv_lora_rank: int, cache_format: str) -> Any:
    """The first shape that suits the rows and fits the device, or None."""
    limit = shared_per_block(arrays.is_gpu(q))
    raw_bytes = cache.shape[2] if FORMATS[cache_format].packed else 0
    rows = min(64, max(16, 1 << (row_count(q, indices) - 1).bit_length()))
    for shape in SHAPES:
        if (
            shape.rows <= rows
            and shape.shared_bytes(q.shape[3], raw_bytes) <= limit
            and shape.result_registers(kv_lora_rank) <= RESULT_REGISTERS
        ):
            return shape
    return None


def element_of(q: Any, cache: Any) -> np.dtype:
    """What is multiplied: the plain cache's numbers, or restored rows in the queries' type."""
    if cache.dtype != CODES:
        return cache.dtype
    return arrays.DTYPES["bfloat16"] if q.dtype == CODES else q.dtype


def copy_bytes(cache: Any) -> int:
    """Bytes of the widest copy that all rows of the cache allow, 16 at most."""
    places = (arrays.address(cache), *cache.strides[:2], cache.shape[2] * cache.dtype.itemsize)
    return next(n for n in (16, 8, 4, 2, 1) if not any(place % n for place in places))


def unsupported(
    q: Any, cache: Any, indices: Any, kv_lora_rank: int, cache_format: str, out: Any, **_: Any
) -> str | None:
    """Why the tensor cores cannot take these arguments, or None."""
    element = element_of(q, cache)
    if element.itemsize != 2:
        return f"multiplies 16-bit numbers, not {element}"
    fmt = FORMATS[cache_format]
    if fmt.packed and not fmt.needs_scale and element == np.float16:
        return f"float16 may not hold restored rows of {fmt.name}"
    latent, rope = kv_lora_rank, q.shape[3] - kv_lora_rank
    if cache_format == "fp8_ds_mla" and latent // TILE % 2:
        return f"keys of fp8_ds_mla rows with L = {latent} are not at multiples of 8 bytes"
    if latent % 8 or rope % 8:
        return f"L = {latent} and R = {rope} are no multiples of 8"
    vector = 8 * q.dtype.itemsize
    if any(place % vector for place in (arrays.address(q), *q.strides[:3])):
        return f"rows of q are not at multiples of {vector} bytes"
    if copy_bytes(cache) < (4 if fmt.packed else 16):
        return "rows of the cache are not at multiples of 16 bytes (packed ones: of 4)"
    if any(place % 16 for place in (arrays.address(out), *out.strides[:3])):
        return "rows of out are not at multiples of 16 bytes"
    if shape_for(q, cache, indices, kv_lora_rank, cache_format) is None:
        return f"rows of {q.shape[3]} values do not fit this GPU's shared memory and registers"
    return None


@dataclass(frozen=True)
class Cut:
    """How sequences are cut: a kind of decode_schedule.cuh, the groups of blocks that take a part
    each, the kind's size and most parts, and slots for partial results."""

    kind: str
    groups: int
    size: int
    most: int
    slots: int


def cut_for(arguments: Mapping[str, Any], shape: Shape, sequences: int, row_blocks: int) -> Cut:
    if arguments["deterministic"]:
        most = max(1, -(-_longest(arguments) // PIECE_TOKENS))
        parts = sequences * most
        return Cut("PIECES", parts, PIECE_TOKENS // shape.tokens, most, parts * (most > 1))
    if (splits := arguments["num_splits"]) is not None:
        splits = min(splits, max(1, -(-_longest(arguments) // shape.tokens)))
        parts = sequences * splits
        return Cut("SPLITS", parts, splits, splits, parts * (splits > 1))
    device = device_info() if arrays.is_gpu(arguments["q"]) else None
    groups = max(1, (device.sms if device else HOST_SMS) // row_blocks)
    work = sequences * (-(-_longest(arguments) // shape.tokens) + OVERHEAD)
    groups = -(
        -work // -(-work // groups)
    )  # those that have a share, at the most work there can be
    return Cut("SHARES", groups, 0, 0, 2 * groups)


def _longest(arguments: Mapping[str, Any]) -> int:
    """The most keys that a sequence may have."""
    if arguments["indices"] is not None:
        return arguments["indices"].shape[2]
    room = arguments["block_table"].shape[1] * arguments["cache"].shape[1]
    return room if arguments["max_seq_len"] is None else min(room, arguments["max_seq_len"])


@decode_attention.variant(
    "raw_mma", kind="cuda", min_cc=(8, 0), supports=unsupported, preference=40
)
def raw_mma(**arguments: Any) -> None:
    """Tensor cores; up to 64 heads share each tile of keys, all keys are dealt out to the SMs."""
    q, cache, indices, out = (arguments[name] for name in ("q", "cache", "indices", "out"))
    requests, tokens, heads, width = q.shape
    latent, cache_format = arguments["kv_lora_rank"], arguments["cache_format"]
    sequences, rows = requests * (1 if indices is None else tokens), row_count(q, indices)
    if sequences * rows == 0:
        return
    shape = shape_for(q, cache, indices, latent, cache_format)
    row_blocks = -(-rows // shape.rows)
    cut = cut_for(arguments, shape, sequences, row_blocks)
    partials = scratch(q, "decode partials", (cut.slots, rows, latent))
    partial_lses = scratch(q, "decode partial LSEs", (cut.slots, rows))
    parts = scratch(q, "decode parts", (sequences, 3), np.int32)
    lse = request_lse(arguments)
    results = (out, strides(out, 3), lse, strides(lse, 3), from_natural(arguments["lse_base"]))
    packed = FORMATS[cache_format].packed
    shared_bytes = shape.shared_bytes(width, cache.shape[2] if packed else 0)
    macros = {
        **latent_macros(arguments),
        "ELEMENT": element_of(q, cache),
        "OUT": out.dtype,
        "HEADS": heads,
        "SPARSE": indices is not None,
        "TREE": arguments["tree_mask"] is not None,
        "ROWS": shape.rows,
        "TOKENS": shape.tokens,
        "WARPS": shape.warps,
        "TEAMS": shape.teams,
        "QK_M": shape.qk_m,
        "QK_K": shape.qk_k,
        "CUT": cut.kind,
        "OVERHEAD": OVERHEAD,
        "COPY_BYTES": copy_bytes(cache),
        "BLOCK_SIZE": cache.shape[1],
        "SHARED": shared_bytes,
    }
    ATTEND(
        cut.groups * row_blocks,
        32 * shape.warps,
        q,
        *key_arguments(arguments),
        strides(q, 3),
        sequences,
        rows,
        cut.groups,
        cut.size,
        cut.most,
        arguments["softmax_scale"],
        arguments["q_descale"],
        arguments["k_scale"],
        arguments["sink"],
        *results,
        partials,
        partial_lses,
        parts,
        macros=macros,
        shared_bytes=shared_bytes,
    )
    if cut.slots:
        few = sequences * rows <= FEW_ROWS
        threads = MERGE_THREADS if few else 32
        teams = MERGE_TEAMS if few and not arguments["deterministic"] else 1
        MERGE(
            -(-sequences * rows * threads // MERGE_THREADS),
            MERGE_THREADS * teams,
            partials,
            partial_lses,
            parts,
            sequences * rows,
            rows,
            arguments["sink"],
            *results,
            macros={
                "OUT": out.dtype,
                "LATENT": latent,
                "HEADS": heads,
                "SEQUENCES_A_REQUEST": 1 if indices is None else tokens,
                "THREADS": MERGE_THREADS * teams,
                "THREADS_A_ROW": threads,
                "TEAMS": teams,
            },
        )
    if arguments["key_mass"] is not None:
        write_key_mass(arguments, lse)
