from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.launch import decode_arguments, format_macros
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "decode_element")
THREADS = 256


@concat_insert_decode.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element or a rotated pair of any output row, in one launch."""
    q_out, kv_c, k_pe = arguments["q_out"], arguments["kv_c"], arguments["k_pe"]
    tokens, heads = arguments["slot_mapping"].shape[0], q_out.shape[1]
    macros = {
        "THREADS": THREADS,
        "ELEMENT": kv_c.dtype,
        "HEADS": heads,
        "ROPE": k_pe.shape[1],
        "LATENT": kv_c.shape[1],
        "FP8_QUERY": arguments["q_descale"] is not None,
        **format_macros(arguments),
    }
    items = (heads + 1) * (kv_c.shape[1] + k_pe.shape[1] // 2)
    blocks = -(-tokens * items // THREADS)
    KERNEL(blocks, THREADS, *decode_arguments(arguments), tokens, macros=macros)
