from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import prefill_arguments
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_element")
THREADS = 256


@concat_insert_prefill.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element or a rotated pair of any output row, in one launch."""
    k_nope, k_pe, kv_c = arguments["k_nope"], arguments["k_pe"], arguments["kv_c"]
    tokens, (heads, nope), rope = (
        arguments["slot_mapping"].shape[0],
        k_nope.shape[1:],
        k_pe.shape[1],
    )
    macros = {
        "THREADS": THREADS,
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
        "LATENT": kv_c.shape[1],
    }
    items = 2 * heads * (nope + rope // 2) + kv_c.shape[1] + rope // 2
    blocks = -(-tokens * items // THREADS)
    KERNEL(blocks, THREADS, *prefill_arguments(**arguments), tokens, macros=macros)
