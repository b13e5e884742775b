from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import (
    in_place,
    prefill_arguments,
    prefill_vector,
    table_vector,
)
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_fused", overlap=True)
THREADS = 384
QUERIES_IN_FLIGHT = 3
KEYS_IN_FLIGHT = {True: 4, False: 3}  # by whether q_out is q: what the registers of a block allow
BLOCKS_PER_SM = 3
ENOUGH_BLOCKS = 512
"""Fewer tokens than this are split by heads, so that all of a large GPU has work."""
FEWEST_HEADS = 8


@concat_insert_prefill.variant("raw_fused", kind="cuda", preference=30)
def raw_fused(**arguments: Any) -> None:
    """Two blocks a token, queries and keys: angles and key read once, four loads in flight."""
    k_nope, kv_c, k_pe = arguments["k_nope"], arguments["kv_c"], arguments["k_pe"]
    tokens, (heads, nope), rope = (
        arguments["slot_mapping"].shape[0],
        k_nope.shape[1:],
        k_pe.shape[1],
    )
    vector = prefill_vector(arguments)
    same = in_place(arguments["q"], arguments["q_out"])
    macros = {
        "THREADS": THREADS,
        "QUERIES_IN_FLIGHT": QUERIES_IN_FLIGHT,
        "KEYS_IN_FLIGHT": KEYS_IN_FLIGHT[same],
        "IN_PLACE": same,
        "BLOCKS_PER_SM": BLOCKS_PER_SM,
        "VECTOR": vector,
        "TABLE_VECTOR": table_vector(arguments["cos_sin"], vector, kv_c.dtype),
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
        "LATENT": kv_c.shape[1],
    }
    groups = max(1, min(ENOUGH_BLOCKS // max(1, tokens), heads // FEWEST_HEADS))
    heads_a_block = -(-heads // groups)
    grid = (2 * tokens, -(-heads // heads_a_block))
    KERNEL(grid, THREADS, *prefill_arguments(**arguments), heads_a_block, macros=macros)
