from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.launch import insert_arguments, warps, widest_vector
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "insert_vector")
ROWS = 8
IN_FLIGHT = 3


@concat_insert.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(**arguments: Any) -> None:
    """A block a tile of tokens as one flat run of 16-byte vectors, each row found once."""
    kv_c, k_pe, cache = arguments["kv_c"], arguments["k_pe"], arguments["cache"]
    item, tokens = kv_c.dtype.itemsize, arguments["slot_mapping"].shape[0]
    vector = widest_vector(kv_c, k_pe, cache)
    threads = warps(-(-ROWS * cache.shape[2] * item // (vector * IN_FLIGHT)))
    macros = {
        "THREADS": threads,
        "ROWS": ROWS,
        "IN_FLIGHT": IN_FLIGHT,
        "VECTOR": vector,
        "LATENT_BYTES": kv_c.shape[1] * item,
        "ROPE_BYTES": k_pe.shape[1] * item,
    }
    KERNEL(-(-tokens // ROWS), threads, *insert_arguments(**arguments), tokens, macros=macros)
