"""The ops that a user calls."""

from sandbox.kernels.concat_insert import (
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
)
from sandbox.kernels.gather import gather
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k
from sandbox.kernels.op import OPS, Unavailable

__all__ = [
    "OPS",
    "Unavailable",
    "concat_insert",
    "concat_insert_decode",
    "concat_insert_prefill",
    "gather",
    "lse_merge",
    "lse_merge_k",
]
