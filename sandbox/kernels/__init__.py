"""The ops that a user calls."""

from sandbox.kernels.attention import decode_attention, prefill_attention
from sandbox.kernels.concat_context import concat_context, concat_context_fp8
from sandbox.kernels.concat_insert import (
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
    concat_insert_prefill_fp8,
)
from sandbox.kernels.gather import dequantize_context, gather
from sandbox.kernels.linear import linear
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k
from sandbox.kernels.op import OPS, Unavailable
from sandbox.kernels.quantize import quantize_groups, quantize_nvfp4, quantize_static
from sandbox.kernels.rms_norm import rms_norm
from sandbox.kernels.sigmoid_gate import sigmoid_gate

__all__ = [
    "OPS",
    "Unavailable",
    "concat_context",
    "concat_context_fp8",
    "concat_insert",
    "concat_insert_decode",
    "concat_insert_prefill",
    "concat_insert_prefill_fp8",
    "decode_attention",
    "dequantize_context",
    "gather",
    "linear",
    "lse_merge",
    "lse_merge_k",
    "prefill_attention",
    "quantize_groups",
    "quantize_nvfp4",
    "quantize_static",
    "rms_norm",
    "sigmoid_gate",
]
