"""What goes together in a layer and in a call of it: said before anything is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import format_by_name
from sandbox.dims import MLADims
from sandbox.kernels import OPS, cache_arguments, require
from sandbox.layers.rope import Rope
from sandbox.layers.step import ContextChunk, Step
from sandbox.layers.weights import MLAWeights
from sandbox.planner import ContextParallel

if TYPE_CHECKING:
    from sandbox.layers.mla import MLALayer

DESCALES = tuple(f"prefill_descales' {name}_descale" for name in "qkv")


def weights(given: MLAWeights, dims: MLADims, output_gate: bool, rank: int, size: int) -> None:
    if (given.tp_rank, given.tp_size) != (rank, size):
        raise ValueError(
            f"weights are those of rank {given.tp_rank} of {given.tp_size}, but tp_rank is {rank} "
            f"and tp_size {size}"
        )
    if given.dims != dims.shard_heads(size):
        raise ValueError(f"weights are of {given.dims}, but dims are {dims.shard_heads(size)}")
    if output_gate != (given.g_proj is not None):
        has = "no g_proj" if output_gate else "a g_proj"
        raise ValueError(f"output_gate is {output_gate}, but weights have {has}")


def rope(given: Any, dims: MLADims) -> None:
    rotates = dims.rope and dims.R > 0
    if given is None:
        if rotates:
            raise ValueError(f"rope is missing: the model rotates {dims.R} columns (dims.rope)")
        return
    if not isinstance(given, Rope):
        raise TypeError(f"rope is {type(given).__name__}, expected a Rope or None")
    if not rotates:
        raise ValueError("rope is given, but dims say that nothing is rotated")
    if given.cos_sin.shape[1] != dims.R:
        raise ValueError(f"rope has width {given.cos_sin.shape[1]}, expected R = {dims.R}")


def cache_format(name: str | None, dims: MLADims, dtype: np.dtype) -> str:
    fmt = format_by_name(dtype.name if name is None else name)
    if not fmt.packed and fmt.storage != dtype:
        raise TypeError(
            f"cache_format is {fmt.name!r}, but weights are {dtype}: plain rows are of that dtype"
        )
    fmt.row_bytes(dims)
    return fmt.name


def variants(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise TypeError(f"variants is {type(given).__name__}, expected {{op name: variant name}}")
    for name, variant in given.items():
        if name not in OPS:
            raise ValueError(f"variants names an op {name!r}, expected one of {', '.join(OPS)}")
        if variant != "auto" and variant not in OPS[name].variants:
            known = ", ".join(OPS[name].variants)
            raise ValueError(f"variants has {variant!r} for {name}, expected one of {known}")
    return dict(given)


def scale(value: Any, name: str) -> Any:
    """A descale: a positive number, or an array of one element, adopted once for all calls."""
    if value is None:
        return None
    if hasattr(value, "__dlpack__"):
        found = arrays.adopt(value, name)
        if found.size != 1:
            raise ValueError(f"{name}: expected one element, got shape {tuple(found.shape)}")
        return found
    number = require.number(value, name)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value}, expected a positive and finite number")
    return value


def descales(given: Any) -> tuple[Any, Any, Any] | None:
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise ValueError("prefill_descales needs three: of q, k and v")
    return tuple(scale(value, name) for name, value in zip(DESCALES, given))


def ranks(parallel: Any, collective: Any) -> None:
    if parallel is not None and not isinstance(parallel, ContextParallel):
        raise TypeError(
            f"context_parallel is {type(parallel).__name__}, expected a ContextParallel or None"
        )
    if not hasattr(collective, "all_gather"):
        raise TypeError(
            f"collective is {type(collective).__name__}, expected one rank's Collective"
        )
    expected = parallel.world_size if parallel else 1
    if collective.world_size != expected:
        raise ValueError(
            f"collective has {collective.world_size} ranks, but context_parallel {expected}"
        )


def call(layer: MLALayer, kind: arrays.Kind, hidden: Any) -> None:
    """The hidden states of any call."""
    require.array(hidden, "hidden", "tokens", "H")
    require.dtype(hidden, "hidden", layer.dtype)
    require.size(hidden, "hidden", 1, layer.dims.H, "hidden_size")
    require.strided_rows(hidden, "hidden")
    home = arrays.exporter(layer.weights.o_proj)
    if home.gpu != kind.gpu:
        raise ValueError(f"hidden is on {kind.device}, but the weights are on {home.device}")


def step(layer: MLALayer, given: Any, hidden: Any, cache: Any, positions: Any) -> None:
    """A step against the layer and the arrays that it is to work on."""
    if not isinstance(given, Step):
        raise TypeError(f"plan is {type(given).__name__}, expected a Plan, a Step or None")
    here = arrays.exporter(hidden)
    if arrays.exporter(given.positions).gpu != here.gpu:
        raise ValueError(f"plan was prepared for another device than {here.device}: like=hidden")
    if given.parallel != layer.context_parallel:
        raise ValueError(
            f"plan is for contexts of {given.parallel}, the layer's are of {layer.context_parallel}"
        )
    if given.parallel is not None and given.rank != layer.collective.rank:
        raise ValueError(f"plan is rank {given.rank}'s, the layer is rank {layer.collective.rank}")
    require.at_least(hidden, "hidden", 0, given.num_tokens, "one row a token of the plan")
    fmt = format_by_name(layer.cache_format)
    require.array(cache, "cache", "num_blocks", "block_size", "row")
    require.dtype(cache, "cache", fmt.storage)
    require.size(cache, "cache", 1, given.block_size, "the plan's block_size")
    require.size(cache, "cache", 2, fmt.row_elements(layer.dims), f"a row of {fmt.name}")
    require.apart({"cache": cache}, {"hidden": hidden})
    if positions is not None:
        require.array(positions, "positions", "tokens")
        require.dtype(positions, "positions", np.int64)
        require.at_least(positions, "positions", 0, given.num_tokens, "one a token")
    if here.gpu is None:
        _values(layer, given, cache, given.positions if positions is None else positions)


def _values(layer: MLALayer, step: Step, cache: Any, positions: Any) -> None:
    """On a CPU, what the ops would say when cache rows of others have been written already."""
    num_blocks, block_size, _ = cache.shape
    tokens = step.num_tokens
    if layer.rope is not None and tokens:
        last = len(layer.rope.cos_sin) - 1
        lowest, highest = int(positions[:tokens].min()), int(positions[:tokens].max())
        if lowest < 0 or highest > last:
            raise ValueError(f"positions run from {lowest} to {highest}, expected 0 to {last}")
    if tokens and int(step.slot_mapping.max()) >= num_blocks * block_size:
        raise ValueError(
            f"plan has slot {int(step.slot_mapping.max())}, but the cache has "
            f"{num_blocks * block_size}"
        )
    if step.decode is not None:
        _blocks(step.decode.block_table, step.decode.seq_lens, cache)
    if step.prefill is not None:
        for chunk in step.prefill.chunks:
            own = _own_rows(chunk, step.rank)
            _blocks(chunk.block_table, np.where(own > 0, chunk.starts + own, 0), cache)
    scales = {
        "k_scale": layer.k_scale,
        "output_scale": layer.output_scale,
        "decode_q_descale": layer.decode_q_descale,
        **dict(zip(DESCALES, layer.prefill_descales or ())),
    }
    held = {n: value.reshape(1) for n, value in scales.items() if arrays.is_array(value)}
    cache_arguments.positive_scales(**held)


def _own_rows(chunk: ContextChunk, rank: int) -> np.ndarray:
    """Rows of each request that hold keys on this rank; what it gathers beyond is padding."""
    if chunk.order is None:
        return np.diff(chunk.row_bounds)
    holder, row = np.divmod(chunk.order, chunk.num_rows)
    request = np.searchsorted(chunk.row_bounds, row[holder == rank], side="right") - 1
    return np.bincount(request, minlength=len(chunk.starts))


def _blocks(table: np.ndarray, lens: np.ndarray, cache: Any) -> None:
    needed, columns = -(-lens // cache.shape[1]), table.shape[1]
    if int(needed.max(initial=0)) > columns:
        raise ValueError(
            f"plan has a request of {int(needed.max())} blocks, but its block_table has {columns} "
            "columns"
        )
    used = table[np.arange(columns) < needed[:, None]]
    wrong = used[(used < 0) | (used >= len(cache))]
    if wrong.size:
        raise ValueError(f"plan has block {wrong[0]}, but the cache has {len(cache)}")
