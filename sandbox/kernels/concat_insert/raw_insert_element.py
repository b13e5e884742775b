from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.launch import format_macros, insert_arguments
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "insert_element")
THREADS = 256


@concat_insert.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element, or a scale's values, each finding its token's row for itself."""
    kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
    tokens = arguments["slot_mapping"].shape[0]
    macros = {
        "THREADS": THREADS,
        "ELEMENT": kv_c.dtype,
        "LATENT": kv_c.shape[1],
        "ROPE": k_pe.shape[1],
        **format_macros(arguments),
    }
    blocks = -(-tokens * (kv_c.shape[1] + k_pe.shape[1] // 2) // THREADS)
    KERNEL(blocks, THREADS, *insert_arguments(arguments), tokens, macros=macros)
