from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill_fp8
from sandbox.kernels.concat_insert.head_launch import (
    codes_a_store,
    halves,
    heads_a_block,
    prefill_fp8_arguments,
)
from sandbox.kernels.concat_insert.launch import format_macros, table_vector, torn_pairs
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.vectors import widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_fp8_fused", overlap=True)
THREADS, IN_FLIGHT, BLOCKS_PER_SM = 256, 2, 3
MOST_CODES = 16
"""What one thread stores at a time."""


def _count(arguments: dict[str, Any]) -> int:
    nope = arguments["k_nope"].shape[2]
    sources = [*halves(arguments["q"], nope), *(arguments[n] for n in ("k_nope", "v", "k_pe"))]
    targets = [*halves(arguments["q_out"], nope), *halves(arguments["k_out"], nope)]
    return codes_a_store(sources, [*targets, arguments["v_out"]], MOST_CODES)


def _supports(**arguments: Any) -> str | None:
    if arguments["positions"] is not None and _count(arguments) == 1:
        return "rotates the pairs that it loads, but heads are aligned to single elements only"
    return torn_pairs(**arguments)


@concat_insert_prefill_fp8.variant("raw_fused", kind="cuda", preference=30, supports=_supports)
def raw_fused(**arguments: Any) -> None:
    """Two blocks a token, keys with values, and queries: 16-byte stores of codes, key read once."""
    kv_c, k_pe, cos_sin = (arguments[name] for name in ("kv_c", "k_pe", "cos_sin"))
    tokens, (heads, nope) = arguments["slot_mapping"].shape[0], arguments["k_nope"].shape[1:]
    count = _count(arguments)
    macros = {
        "THREADS": THREADS,
        "IN_FLIGHT": IN_FLIGHT,
        "BLOCKS_PER_SM": BLOCKS_PER_SM,
        "COUNT": count,
        "VECTOR": widest_vector(kv_c, k_pe),
        "TABLE_VECTOR": table_vector(cos_sin, count * kv_c.dtype.itemsize, kv_c.dtype),
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": k_pe.shape[1],
        "VALUE": arguments["v"].shape[2],
        "LATENT": kv_c.shape[1],
        **format_macros(arguments),
    }
    in_block = heads_a_block(tokens, heads)
    grid = (2 * tokens, -(-heads // in_block))
    KERNEL(grid, THREADS, *prefill_fp8_arguments(arguments), in_block, macros=macros)
