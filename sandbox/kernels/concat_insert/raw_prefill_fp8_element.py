from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill_fp8
from sandbox.kernels.concat_insert.head_launch import prefill_fp8_arguments
from sandbox.kernels.concat_insert.launch import format_macros
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_fp8_element")
THREADS = 256


@concat_insert_prefill_fp8.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element or a rotated pair of any output row, in one launch."""
    latent, rope = arguments["kv_c"].shape[1], arguments["k_pe"].shape[1]
    tokens, (heads, nope) = arguments["slot_mapping"].shape[0], arguments["k_nope"].shape[1:]
    value = arguments["v"].shape[2]
    macros = {
        "THREADS": THREADS,
        "ELEMENT": arguments["q"].dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
        "VALUE": value,
        "LATENT": latent,
        **format_macros(arguments),
    }
    items = heads * (2 * nope + rope + value) + latent + rope // 2
    blocks = -(-tokens * items // THREADS)
    KERNEL(blocks, THREADS, *prefill_fp8_arguments(arguments), tokens, macros=macros)
