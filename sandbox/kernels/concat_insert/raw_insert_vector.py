from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.launch import insert_arguments, warps, widest_vector
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "insert_vector", overlap=True)
FEW_TOKENS = 512
ROWS, IN_FLIGHT = 8, 3
FEW_ROWS, FEW_IN_FLIGHT = 1, 1
"""Up to `FEW_TOKENS`, where latency is all, a block takes one token and a thread one vector."""


@concat_insert.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(**arguments: Any) -> None:
    """A block a tile of tokens as one flat run of 16-byte vectors, each row found once."""
    kv_c, k_pe, cache = arguments["kv_c"], arguments["k_pe"], arguments["cache"]
    item, tokens = kv_c.dtype.itemsize, arguments["slot_mapping"].shape[0]
    vector = widest_vector(kv_c, k_pe, cache)
    few = tokens <= FEW_TOKENS
    rows, in_flight = (FEW_ROWS, FEW_IN_FLIGHT) if few else (ROWS, IN_FLIGHT)
    threads = warps(-(-rows * cache.shape[2] * item // (vector * in_flight)))
    macros = {
        "THREADS": threads,
        "ROWS": rows,
        "IN_FLIGHT": in_flight,
        "VECTOR": vector,
        "LATENT_BYTES": kv_c.shape[1] * item,
        "ROPE_BYTES": k_pe.shape[1] * item,
    }
    KERNEL(-(-tokens // rows), threads, *insert_arguments(**arguments), tokens, macros=macros)
