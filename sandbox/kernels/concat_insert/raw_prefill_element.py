from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import format_macros, prefill_arguments
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_element")
THREADS = 256


@concat_insert_prefill.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element or a rotated pair of any output row, in one launch."""
    kv_c, rope = arguments["kv_c"], arguments["k_pe"].shape[1]
    tokens, (heads, nope) = arguments["slot_mapping"].shape[0], arguments["k_nope"].shape[1:]
    macros = {
        "THREADS": THREADS,
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
        "LATENT": kv_c.shape[1],
        **format_macros(arguments),
    }
    items = 2 * heads * (nope + rope // 2) + kv_c.shape[1] + rope // 2
    blocks = -(-tokens * items // THREADS)
    KERNEL(blocks, THREADS, *prefill_arguments(arguments), tokens, macros=macros)
