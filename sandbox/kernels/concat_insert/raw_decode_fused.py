from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.launch import (
    code_vector,
    decode_arguments,
    decode_vector,
    format_macros,
    table_vector,
    torn_pairs,
    warps,
)
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "decode_fused", overlap=True)
HEADS_A_BLOCK = 4
IN_FLIGHT = 3


@concat_insert_decode.variant("raw_fused", kind="cuda", preference=30, supports=torn_pairs)
def raw_fused(**arguments: Any) -> None:
    """A block a few heads as one flat run of 16-byte vectors, and one a token for the cache row."""
    q_out, kv_c, k_pe = arguments["q_out"], arguments["kv_c"], arguments["k_pe"]
    tokens, heads = arguments["slot_mapping"].shape[0], q_out.shape[1]
    fp8_query = arguments["q_descale"] is not None
    vector = decode_vector(arguments)
    row_bytes = q_out.shape[2] * kv_c.dtype.itemsize  # as they are read
    threads = warps(-(-HEADS_A_BLOCK * row_bytes // (vector * IN_FLIGHT)))
    macros = {
        "THREADS": threads,
        "HEADS_A_BLOCK": HEADS_A_BLOCK,
        "IN_FLIGHT": IN_FLIGHT,
        "VECTOR": vector,
        "TABLE_VECTOR": table_vector(arguments["cos_sin"], vector, kv_c.dtype),
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "ROPE": k_pe.shape[1],
        "LATENT": kv_c.shape[1],
        "FP8_QUERY": fp8_query,
        "QUERY_VECTOR": code_vector(q_out, kv_c.shape[1]) if fp8_query else vector,
        **format_macros(arguments),
    }
    grid = (tokens, 1 + -(-heads // HEADS_A_BLOCK))
    KERNEL(grid, threads, *decode_arguments(arguments), macros=macros)
