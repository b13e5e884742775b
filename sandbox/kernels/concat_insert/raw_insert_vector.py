from pathlib import Path
from typing import Any

from sandbox.cache_formats import FORMATS
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.launch import format_macros, insert_arguments, torn_pairs, warps
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.vectors import widest_vector

PLAIN = CudaKernel(Path(__file__).with_suffix(".cu"), "insert_vector", overlap=True)
PACKED = CudaKernel(Path(__file__).with_name("raw_insert_packed.cu"), "insert_packed", overlap=True)
FEW_TOKENS = 512
"""Up to so many, latency is all: a block takes one token, a thread one vector of it."""
ROWS, IN_FLIGHT = 8, 3
FEW_ROWS, FEW_IN_FLIGHT = 1, 1
TEAMS = 4


@concat_insert.variant("raw_vector", kind="cuda", preference=30, supports=torn_pairs)
def raw_vector(**arguments: Any) -> None:
    """16-byte vectors, each row found once: a tile of rows as one run, or a warp a packed row."""
    if FORMATS[arguments["cache_format"]].packed:
        _packed(arguments)
    else:
        _plain(arguments)


def _plain(arguments: dict[str, Any]) -> None:
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
        "KV_C_BYTES": kv_c.shape[1] * item,
        "K_PE_BYTES": k_pe.shape[1] * item,
    }
    PLAIN(-(-tokens // rows), threads, *insert_arguments(arguments), tokens, macros=macros)


def _packed(arguments: dict[str, Any]) -> None:
    kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
    tokens, width = arguments["slot_mapping"].shape[0], kv_c.shape[1] + k_pe.shape[1]
    few = tokens <= FEW_TOKENS
    per_token = arguments["cache_format"].endswith("_per_token")  # a scale is one warp's work
    team = warps(-(-width // 8)) if few and not per_token else 32
    threads = team if few else TEAMS * team
    macros = {
        "THREADS": threads,
        "TEAM": team,
        "VECTOR": widest_vector(kv_c, k_pe),
        "ELEMENT": kv_c.dtype,
        "LATENT": kv_c.shape[1],
        "ROPE": k_pe.shape[1],
        **format_macros(arguments),
    }
    blocks = -(-tokens * team // threads)
    PACKED(blocks, threads, *insert_arguments(arguments), tokens, macros=macros)
