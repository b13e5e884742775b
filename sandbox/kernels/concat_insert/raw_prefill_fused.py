from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.head_launch import heads_a_block
from sandbox.kernels.concat_insert.launch import (
    format_macros,
    in_place,
    prefill_arguments,
    prefill_vector,
    table_vector,
    torn_pairs,
)
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_fused", overlap=True)
THREADS = 384
QUERIES_IN_FLIGHT = 3
KEYS_IN_FLIGHT = {True: 4, False: 3}
"""By whether a block has registers left: q_out is q and the cache is plain."""
BLOCKS_PER_SM = 3


@concat_insert_prefill.variant("raw_fused", kind="cuda", preference=30, supports=torn_pairs)
def raw_fused(**arguments: Any) -> None:
    """Two blocks a token, queries and keys: angles and key read once, four loads in flight."""
    kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
    tokens, (heads, nope) = arguments["slot_mapping"].shape[0], arguments["k_nope"].shape[1:]
    vector = prefill_vector(arguments)
    same = in_place(arguments["q"], arguments["q_out"])
    row = format_macros(arguments)
    macros = {
        "THREADS": THREADS,
        "QUERIES_IN_FLIGHT": QUERIES_IN_FLIGHT,
        "KEYS_IN_FLIGHT": KEYS_IN_FLIGHT[same and row["FORMAT"] == "PLAIN"],
        "IN_PLACE": same,
        "BLOCKS_PER_SM": BLOCKS_PER_SM,
        "VECTOR": vector,
        "TABLE_VECTOR": table_vector(arguments["cos_sin"], vector, kv_c.dtype),
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": k_pe.shape[1],
        "LATENT": kv_c.shape[1],
        **row,
    }
    in_block = heads_a_block(tokens, heads)
    grid = (2 * tokens, -(-heads // in_block))
    KERNEL(grid, THREADS, *prefill_arguments(arguments), in_block, macros=macros)
